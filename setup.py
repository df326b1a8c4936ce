"""The one part of the build that `pyproject.toml` cannot say: the kernels of the cpu device.

Where they cannot be compiled, cupaged is built without them and computes with NumPy.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path("cupaged/ops/native")


class BuildSideBySide(build_ext):
    """Compiles several files at a time."""

    def build_extensions(self) -> None:
        """As always, but for the compiler's `compile`."""
        compile_all = self.compiler.compile

        def compile_each(sources: list[str], *args: Any, **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as compilers:
                made = compilers.map(lambda s: compile_all([s], *args, **options), sources)
                return [path for paths in made for path in paths]

        self.compiler.compile = compile_each
        super().build_extensions()


setup(
    cmdclass={"build_ext": BuildSideBySide},
    ext_modules=[
        Extension(
            "cupaged.ops._native",
            sorted((str(path) for path in NATIVE.glob("*.cpp")), reverse=True),
            depends=sorted(str(path) for path in [*NATIVE.glob("*.h"), *NATIVE.glob("*.inc")]),
            extra_compile_args=[
                "-std=gnu++17", "-O3", "-ffp-contract=fast", "-fno-math-errno",
                "-fno-trapping-math", "-fvisibility=hidden", "-pthread",
            ],
            extra_link_args=["-pthread"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)  # fmt: skip
