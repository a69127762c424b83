"""The C kernels, plain C loaded through ctypes. Everything else about the package stands in pyproject.toml.

Optional: without a C compiler the package installs all the same, and says what is missing when kernels are asked for.
No file of a wheel depends on the version of Python, so one wheel serves all of them.
"""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = "baton/runner/backends/cpu/kernels"
LIBRARY = "libkernels.so"
OPTIMISED = "-O3"


class BuildKernels(build_ext):
    """Compiles the sources side by side; setuptools takes one after the other."""

    def build_extension(self, ext):
        if re.search(r"(?:^|\s)-O", os.environ.get("CFLAGS", "")):
            ext.extra_compile_args.remove(OPTIMISED)  # it would override the builder's
        compile_some = self.compiler.compile

        def compile_each(sources, **options):
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = pool.map(lambda source: compile_some([source], **options), sources)
                return [path for of_source in objects for path in of_source]

        self.compiler.compile = compile_each
        super().build_extension(ext)

    def get_ext_filename(self, fullname):
        """The name under which ctypes finds the library; the usual one contains the version of Python."""
        return os.path.join(*fullname.split(".")) + ".so"

    def get_export_symbols(self, ext):
        return []  # it is no module of Python, and has no PyInit function


class KernelWheel(bdist_wheel):
    """A wheel for every Python 3, whose tag says which glibc the kernels need (PEP 600)."""

    def get_tag(self):
        platform = super().get_tag()[2]
        built = Path(self.bdist_dir or "", FOLDER, LIBRARY)
        if built.exists() and platform.startswith("linux_"):
            platform = platform.replace("linux", f"manylinux_{needed_glibc(built.read_bytes())}", 1)
        return "py3", "none", platform


def needed_glibc(library):
    """The version of the youngest symbol of glibc that a library uses, as `2_34`.

    PEP 600 allows no other libraries than glibc's and a few more; the kernels are linked with glibc alone.
    """
    versions = {tuple(map(int, found.split(b"."))) for found in re.findall(rb"GLIBC_(\d+\.\d+)", library)}
    return "_".join(map(str, max(versions, default=(2, 17))))


setup(
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": KernelWheel},
    ext_modules=[
        Extension(
            "baton.runner.backends.cpu.kernels.libkernels",
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
