"""The C kernels, plain C loaded through ctypes. Everything else about the package stands in pyproject.toml.

Optional: without a C compiler the package installs all the same, and says what is missing when kernels are asked for.
"""

from glob import glob

from setuptools import Extension, setup

FOLDER = "baton/engine/runner/kernels"

setup(
    ext_modules=[
        Extension(
            "baton.engine.runner.kernels._kernels",
            sources=sorted(glob(f"{FOLDER}/csrc/*.c")),
            depends=sorted(glob(f"{FOLDER}/csrc/*.h")),
            # No -march: vector code is chosen at run time. No contraction: a sum is the chain that is written down.
            extra_compile_args=["-std=gnu11", "-O3", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-math-errno"],
            libraries=["m", "pthread"],
            optional=True,
        )
    ]
)
