"""The networks of Stable Diffusion as Flax NNX modules, channels last. Each is imported when it is
first asked for, as Flax takes a second or two.

Attributes are spelled as in diffusers and transformers checkpoints, so that
`down_blocks.0.resnets.1.conv1` is a path in both.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "anima_conditioner": ["AnimaTextConditioner"],
        "controlnet": ["ControlNetModel"],
        "cosmos_transformer": ["CosmosTransformer3DModel"],
        "flux2_transformer": ["Flux2Transformer2DModel"],
        "flux_transformer": ["FluxTransformer2DModel"],
        "ip_adapter": ["IPAdapterModel"],
        "krea2_transformer": ["Krea2Transformer2DModel"],
        "qwen_image_vae": ["AutoencoderKLQwenImage"],
        "safety_checker": ["StableDiffusionSafetyChecker"],
        "qwen3": ["Qwen3Model"],
        "sd3_transformer": ["SD3Transformer2DModel"],
        "t5": ["T5EncoderModel"],
        "text_encoder": ["CLIPTextModel", "CLIPTextModelWithProjection"],
        "tiny_vae": ["AutoencoderTiny"],
        "unet": ["UNet2DConditionModel"],
        "vae": ["AutoencoderKL", "AutoencoderKLFlux2"],
        "z_image_transformer": ["ZImageTransformer2DModel"],
    },
)
