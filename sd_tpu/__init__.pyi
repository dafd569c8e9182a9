from .app import Site as Site
from .app import serve as serve
from .checkpoint.config import BUNDLED_MODEL as BUNDLED_MODEL
from .checkpoint.config import CheckpointError as CheckpointError
from .pictures.drawn import DrawnImage as DrawnImage
from .pictures.images import read_png as read_png
from .pictures.inputs import Input as Input
from .pipelines.beginning import (
    FlaxStableDiffusionImg2ImgPipeline as FlaxStableDiffusionImg2ImgPipeline,
)
from .pipelines.beginning import (
    FlaxStableDiffusionInpaintPipeline as FlaxStableDiffusionInpaintPipeline,
)
from .pipelines.controlnet import (
    FlaxStableDiffusionControlNetPipeline as FlaxStableDiffusionControlNetPipeline,
)
from .pipelines.models import FlaxAutoencoderKL as FlaxAutoencoderKL
from .pipelines.models import FlaxCLIPTextModel as FlaxCLIPTextModel
from .pipelines.models import FlaxCLIPTextModelWithProjection as FlaxCLIPTextModelWithProjection
from .pipelines.models import FlaxControlNetModel as FlaxControlNetModel
from .pipelines.models import FlaxStableDiffusionSafetyChecker as FlaxStableDiffusionSafetyChecker
from .pipelines.models import FlaxUNet2DConditionModel as FlaxUNet2DConditionModel
from .pipelines.pipeline import FlaxDiffusionPipeline as FlaxDiffusionPipeline
from .pipelines.schedulers import FlaxDDIMScheduler as FlaxDDIMScheduler
from .pipelines.schedulers import FlaxDDPMScheduler as FlaxDDPMScheduler
from .pipelines.schedulers import FlaxDPMSolverMultistepScheduler as FlaxDPMSolverMultistepScheduler
from .pipelines.schedulers import FlaxEulerDiscreteScheduler as FlaxEulerDiscreteScheduler
from .pipelines.schedulers import FlaxKarrasVeScheduler as FlaxKarrasVeScheduler
from .pipelines.schedulers import FlaxLMSDiscreteScheduler as FlaxLMSDiscreteScheduler
from .pipelines.schedulers import FlaxPNDMScheduler as FlaxPNDMScheduler
from .pipelines.stable_diffusion import FlaxStableDiffusionPipeline as FlaxStableDiffusionPipeline
from .pipelines.stable_diffusion_xl import (
    FlaxStableDiffusionXLPipeline as FlaxStableDiffusionXLPipeline,
)
from .request import Request as Request
from .serving.arguments import ImageInput as ImageInput
from .serving.arguments import PromptSettings as PromptSettings
from .serving.arguments import Settings as Settings
from .serving.client import ModelOptions as ModelOptions
from .serving.client import StreamEvent as StreamEvent
from .serving.engine import Engine as Engine
from .serving.job import Cancelled as Cancelled
from .serving.job import Done as Done
from .serving.job import DrawingError as DrawingError
from .serving.job import Event as Event
from .serving.job import Failed as Failed
from .serving.job import ImageReady as ImageReady
from .serving.job import Interrupted as Interrupted
from .serving.job import Job as Job
from .serving.job import Progress as Progress
from .serving.job import Queued as Queued
from .serving.scheduler import Busy as Busy
from .settings import RANDOM as RANDOM
from .settings import Picture as Picture
from .settings import RequestError as RequestError
from .training.teach import Estimate as Estimate
from .training.teach import Lesson as Lesson
from .training.teach import TeachingStopped as TeachingStopped
from .training.teach import teach as teach
