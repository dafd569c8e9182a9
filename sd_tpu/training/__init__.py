"""Teaching a model: LoRAs trained on a few pictures, by the networks that draw."""
