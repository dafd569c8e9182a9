"""The page's script: what is served is what its modules say."""

import hashlib
import re
from pathlib import Path

import sd_tpu

PAGE = Path(sd_tpu.__file__).parent / "page"
MODULES = sorted((PAGE / "script").glob("*.js"))
MOST_LINES = 200


def hash_of(modules: list[Path]) -> str:
    """The hash that `make script` writes into the bundle: see script/build.mjs."""
    digest = hashlib.sha256()
    for module in modules:
        digest.update(module.name.encode() + b"\0" + module.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def test_the_bundle_is_made_of_the_modules_as_they_are():
    first = (PAGE / "page.js").read_text("utf-8").partition("\n")[0]
    assert first.endswith(hash_of(MODULES)), "make script"


def test_every_module_is_short_and_says_what_it_is():
    assert len(MODULES) > 10
    for module in MODULES:
        lines = module.read_text("utf-8").splitlines()
        assert len(lines) <= MOST_LINES, module
        assert re.match(r"// [A-Z]", lines[0]), module
