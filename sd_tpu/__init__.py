"""Stable Diffusion on JAX.

>>> from sd_tpu import Engine
>>> engine = Engine.open()  # the bundled model; or a folder, a file or a hub id
>>> pictures = engine.draw(["a cat", "a castle"], seed=7)
>>> pictures[0].save("cat.png")  # a PIL image; the file carries its settings
>>> engine.close()

The names of the package are listed in `__init__.pyi`. Each is imported when it is first used, so
that `import sd_tpu` takes no time: together they take seconds.
"""

import os

import lazy_loader

# Without PyTorch, transformers begins by warning that "models won't be available". None are meant
# to be: only its tokenizer is used. It reads this when it is imported.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
