"""Inductor in a hurry: what torch.compile and AOTInductor compile in a lesson, where seconds of compilation count."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from torch._inductor import config
from torch._inductor.utils import fresh_cache

SETTINGS = {
    "cpp_cache_precompile_headers": False,  # pays only if many kernels are compiled
    "cpp.vec_isa_ok": True,  # no trial compilation that asks what the CPU can do
    "aot_inductor.compile_wrapper_opt_level": "O0",
}
if hasattr(config.aot_inductor, "precompile_headers"):  # not in each version
    SETTINGS["aot_inductor.precompile_headers"] = False


def can_compile() -> bool:
    """Whether there is a C++ compiler for Inductor, and COURSE_AOTI doesn't forbid its use."""
    found = any(shutil.which(name) for name in ("g++", "clang++", "c++"))
    return found and os.name != "nt" and os.environ.get("COURSE_AOTI") != "0"


@contextmanager
def quick_compiler() -> Iterator[None]:
    """Until the block ends, Inductor compiles fast rather than well, and finds an empty cache.

    So a first call is a first call on each run of the notebook. What was compiled goes on working after the block.
    """
    with fresh_cache(), config.patch(SETTINGS):
        yield
