"""How the bundled model was made: data, autoencoder, text encoder and UNet, evaluation."""
