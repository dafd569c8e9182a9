"""The flags that say what is drawn with and on what, and the engine that they describe; the page's
as well."""

import argparse
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd_tpu.checkpoint.config import BUNDLED_MODEL, WEIGHTS
from sd_tpu.checkpoint.division import CHIPS
from sd_tpu.cli.devices import add_devices_flag, find_devices

if TYPE_CHECKING:  # importing it takes seconds
    from sd_tpu.serving.engine import Engine


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `open_engine` reads."""
    add = parser.add_argument_group("model").add_argument
    add(
        "--model",
        default=BUNDLED_MODEL,
        metavar="DIR_OR_FILE_OR_HUB_ID",
        help="checkpoint folder, single .safetensors file, or hub id (default: the bundled model)",
    )
    add(
        "--text-encoder",
        dest="text_encoders",
        action="append",
        default=[],
        metavar="FILE",
        help="a text encoder of --model, where that is a file with a transformer alone which does "
        "not lie in ComfyUI's folders; as often as there are text encoders",
    )
    add("--vae", metavar="FILE", help="the autoencoder of such a --model")
    add(
        "--models",
        type=Path,
        metavar="DIR",
        help="offers every checkpoint in this folder as well: folders and single files",
    )
    add("--revision", help="branch, tag or commit on the hub")
    add("--variant", help="variant of the weight files, such as fp16")
    add(
        "--size",
        type=size,
        metavar="WIDTHxHEIGHT",
        help="size of pictures that ask for none, such as 512x512 (default: the model's)",
    )
    add(
        "--max-pixels",
        type=positive,
        metavar="N",
        help="most pixels that are drawn at once (default: four times those the model was trained "
        "on); larger pictures made from another are drawn in tiles",
    )
    add(
        "--memory",
        type=_gigabytes,
        metavar="GB",
        help="most memory to take on each device; what was used least recently is unloaded to make "
        "room (default: what the device has)",
    )
    add(
        "--tensor-parallel-size",
        type=int,
        choices=CHIPS,
        metavar="N",
        help="divide transformers and language models over 2, 4 or 8 devices each, which draw the "
        "same pictures together (default: the fewest that hold --model, on CPUs 1)",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16", "auto"),
        help="type of weights and arithmetic; auto takes on a CPU what its products are faster in, "
        "which suits full-size models: the bundled one gains little by bfloat16 (default: "
        "float32 on CPU, bfloat16 elsewhere)",
    )
    add(
        "--token-downsampling",
        type=int,
        choices=(1, 2),
        default=1,
        help="2 lets the finest self-attention take its keys and values from every second row and "
        "column only: faster for large pictures, and not quite the same (default: 1)",
    )
    add(
        "--safety-checker",
        action=argparse.BooleanOptionalAction,
        help="whether models that bring a safety checker blur what it flags as not safe for work "
        "(default: where the page is served to others)",
    )
    add(
        "--t5",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether T5 is read, the third text encoder of Stable Diffusion 3, which takes 9.5 GB "
        "in bfloat16; FLUX.1 draws nothing without it (default: where the checkpoint has it)",
    )
    add(
        "--weights",
        choices=WEIGHTS,
        help="round the dense layers of transformers and language models to int8 while they are "
        "loaded: half of bfloat16's memory, and pictures that are not quite the same; w8a8 rounds "
        "what the transformer multiplies by them as well: fewer cycles on TPU v5e by the compiler, "
        "slower on CPUs, and pictures less like the model's",
    )
    add(
        "--prediction-type",
        choices=("epsilon", "v_prediction"),
        help="what the UNet of --model predicts, if its files do not say so",
    )
    add(
        "--zero-snr",
        action=argparse.BooleanOptionalAction,
        help="whether its noise schedule ends without any signal, likewise",
    )
    add(
        "--decoder",
        metavar="DIR_OR_HUB_ID",
        help="a tiny autoencoder such as madebyollin/taesd, or madebyollin/taesdxl for SDXL: it "
        "draws sooner, and not quite the same",
    )
    add(
        "--lora-dir",
        type=Path,
        metavar="DIR",
        help="folder of the LoRAs that <lora:name:strength> names in a prompt",
    )
    add(
        "--embedding-dir",
        type=Path,
        metavar="DIR",
        help="folder of textual-inversion files, which prompts name by their stems",
    )
    add(
        "--wildcard-dir",
        type=Path,
        metavar="DIR",
        help="folder of text files that hold, a line each, what __name__ stands for in a prompt",
    )
    add(
        "--styles",
        type=Path,
        metavar="FILE",
        help="a list of styles as A1111 keeps it: name,prompt,negative_prompt, where {prompt} "
        "stands for the prompt",
    )
    add(
        "--controlnet",
        dest="controlnets",
        action="append",
        default=[],
        metavar="DIR_OR_HUB_ID",
        help="a ControlNet that follows control pictures, such as lllyasviel/sd-controlnet-canny; "
        "several times for several",
    )
    add(
        "--ip-adapter",
        dest="ip_adapters",
        action="append",
        default=[],
        metavar="FILE_OR_HUB_ID",
        help="an IP-Adapter that sees reference pictures: a .safetensors file here, or one on the "
        "hub, as in h94/IP-Adapter/models/ip-adapter_sd15.safetensors; several times for "
        "several",
    )
    add(
        "--image-encoder",
        type=Path,
        metavar="DIR",
        help="the image encoder of the IP-Adapters, where it is not beside them",
    )
    add(
        "--prompt-chunks",
        type=int,
        choices=range(1, 11),
        default=3,
        metavar="N",
        help="chunks of 75 tokens that a prompt may have; the rest is cut (default: 3)",
    )
    add_devices_flag(parser)


def open_engine(args: argparse.Namespace) -> "Engine":
    """Open the engine that the flags describe, before anything else asks JAX for devices.

    Raises:
        ValueError: the model cannot be loaded, or the devices or the size are not possible.
    """
    from sd_tpu.serving.engine import Engine

    find_devices(args.devices)
    return Engine.open(
        devices=args.devices,
        tensor_parallel=args.tensor_parallel_size,
        memory=args.memory,
        dtype=args.dtype,
        **model_options(args),
    )


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags' options of `serving.client.open_models`, except for the dtype."""
    names = (
        "model",
        "models",
        "revision",
        "variant",
        "size",
        "max_pixels",
        "token_downsampling",
        "decoder",
        "decoder_for",
        "prediction_type",
        "zero_snr",
        "t5",
        "weights",
        "text_encoders",
        "vae",
        "lora_dir",
        "embedding_dir",
        "prompt_chunks",
        "wildcard_dir",
        "styles",
        "controlnets",
        "ip_adapters",
        "image_encoder",
    )
    return {
        **{name: getattr(args, name) for name in names},
        "safety_checker": bool(args.safety_checker),
    }


def size(text: str) -> tuple[int, int]:
    """Parse height and width from "WIDTHxHEIGHT", or from one number for a square."""
    match = re.fullmatch(r"([0-9]{1,5})(?: *[xX×*] *([0-9]{1,5}))?", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} should be like 512x512, width first")
    return int(match[2] or match[1]), int(match[1])


def positive(text: str) -> int:
    """Parse a whole number from 1, as argparse's types do."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} should be a whole number from 1")
    return int(text)


def _gigabytes(text: str) -> int:
    """Bytes from gigabytes."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} should be a number of gigabytes above 0")
    return int(number * 1e9)
