"""Builds pyxdev._native from Cython and the C runtime, and pyxdev._pipeline upon it. The rest of the package's data
stands in pyproject.toml."""

from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

sources = sorted(str(path) for path in [*Path("native").glob("*.c"), *Path("native/sim").glob("*.c")])
headers = sorted(str(path) for path in [*Path("native").glob("*.h"), *Path("native/sim").glob("*.h")])

native = Extension(
    "pyxdev._native",
    sources=["pyxdev/_native.pyx", *sources],
    depends=headers,
    include_dirs=["native"],
    extra_compile_args=["-std=c11", "-O2", "-fvisibility=hidden", "-D_GNU_SOURCE"],
    libraries=["pthread", "m"],
)

pipeline = Extension(
    "pyxdev._pipeline",
    sources=["pyxdev/_pipeline.pyx"],
    depends=headers,
    include_dirs=["native"],
    extra_compile_args=["-std=c11", "-O2", "-fvisibility=hidden", "-D_GNU_SOURCE"],
)

directives = {"language_level": "3", "freethreading_compatible": True}
setup(ext_modules=cythonize([native, pipeline], compiler_directives=directives))
