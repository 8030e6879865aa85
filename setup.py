"""The one part of Pliant that is compiled, and only where that works; all else is in pyproject.toml.

Without a compiler the package is complete: what the extension does is then done by torch's operators, bit for bit
(docs/design/0025-sweeps.md).
"""

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# Error numbers and traps of roots and divisions would keep loops from being vectorised. Products are added unrounded
# only where the source says so.
UNIX = ["-O3", "-g0", "-std=c11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-pthread"]
MSVC = ["/O2", "/fp:precise", "/std:c11"]


class BuildSweep(build_ext):
    """With the options of the compiler that there is."""

    def build_extensions(self) -> None:
        windows = self.compiler.compiler_type == "msvc"
        for extension in self.extensions:
            extension.extra_compile_args = MSVC if windows else UNIX
            extension.extra_link_args = [] if windows else ["-pthread"]
        super().build_extensions()


SWEEP = Extension(
    "pliant.tensors._sweep",
    ["src/pliant/tensors/_sweep.c"],
    depends=["src/pliant/tensors/_sweep_variant.h", "src/pliant/tensors/_sweep_loops.h"],
    py_limited_api=True,
    optional=True,
)

setup(
    ext_modules=[SWEEP],
    cmdclass={"build_ext": BuildSweep},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
