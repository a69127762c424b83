"""The C kernels, plain C loaded through ctypes. Everything else about the package stands in pyproject.toml.

Optional: without a C compiler the package installs all the same, and says what is missing when kernels are asked for.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = "baton/runner/backends/cpu/kernels"


class BuildKernels(build_ext):
    """Compiles the sources side by side; setuptools takes one after the other."""

    def build_extension(self, ext):
        compile_some = self.compiler.compile

        def compile_each(sources, **options):
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = pool.map(lambda source: compile_some([source], **options), sources)
                return [path for of_source in objects for path in of_source]

        self.compiler.compile = compile_each
        super().build_extension(ext)


setup(
    cmdclass={"build_ext": BuildKernels},
    ext_modules=[
        Extension(
            "baton.runner.backends.cpu.kernels._kernels",
            # The one that takes longest first.
            sources=sorted(glob(f"{FOLDER}/csrc/*.c"), key=lambda path: (not path.endswith("/portable.c"), path)),
            depends=sorted(glob(f"{FOLDER}/csrc/*.h")),
            # No -march: vector code is chosen at run time. No contraction: a sum is the chain that is written down.
            extra_compile_args=[
                "-std=gnu11",
                "-O3",
                "-ffp-contract=off",
                "-fno-strict-aliasing",
                "-fno-math-errno",
                "-g0",
            ],
            libraries=["m", "pthread"],
            optional=True,
        )
    ],
)
