"""Build the compiled core. MOECACHE_BUILD=release (default), debug or sanitize."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import Cython
import numpy as np
from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FLAGS = {
    "release": ["-O3", "-g0"],
    "debug": ["-O0", "-g", "-UNDEBUG", "-DMOECACHE_FAULTS"],
    # Python's own flags have -fwrapv: with it the kernels compile four times as long, and signed
    # overflow is none. Unoptimised, what Cython writes compiles in less than half of the time.
    "sanitize": [
        *("-O0", "-g1", "-fno-wrapv", "-DMOECACHE_FAULTS"),
        *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    ],
}

# Not contracted: a sum has the same bits on every processor. The others let loops with a root or
# a choice be vectorised and change no result: nobody reads errno or the exception flags.
ARITHMETIC = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]

build = os.environ.get("MOECACHE_BUILD", "release")
if build not in FLAGS:
    raise SystemExit(f"MOECACHE_BUILD={build!r} is not one of {', '.join(FLAGS)}")
checked = build != "release"
# Of the sanitizer's kernels. Their tests compute more than all others together, and take as long
# without these passes; -O0 compiles no faster.
kernel_flags = [
    *("-O1", "-fno-tree-pta", "-fno-move-loop-invariants", "-fno-gcse"),
    "-fira-algorithm=priority",
]
cpuinfo = Path("/proc/cpuinfo")
if cpuinfo.exists():
    # Levels that no test could run here: a tenth of what is compiled.
    known = cpuinfo.read_text().split()
    kernel_flags += [
        f"-DMC_WITHOUT_{level}"
        for level, flag in (("AVXVNNI", "avx_vnni"), ("AMX", "amx_tile"))
        if flag not in known
    ]
num_cores = len(os.sched_getaffinity(0))
# A folder of what was compiled, if any: another release build takes the same from there.
cache = None if checked else os.environ.get("MOECACHE_BUILD_CACHE")
if cache:
    try:
        os.makedirs(cache, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"MOECACHE_BUILD_CACHE={cache!r} is no folder: {error}") from error

headers = sorted(path.as_posix() for path in Path("moecache").rglob("*.h"))
folders = sorted({os.path.dirname(header) for header in headers})
# The folder of the C that a module has beside what Cython makes of it.
OWN_C = {"moecache/kernels/_processor.pyx": "levels"}


def sources_of(path: Path) -> list[str]:
    """Return a module's source, and its files in C."""
    own = OWN_C.get(path.as_posix())
    files = sorted((path.parent / own).glob("*.c")) if own else []
    return [file.as_posix() for file in (path, *files)]


def is_current(target: Path) -> bool:
    """Return whether an object is newer than all that its compiler read, and than this file."""
    try:
        made, read = target.stat().st_mtime, target.with_suffix(".d").read_text()
        names = read.replace("\\\n", " ").partition(": ")[2].split()
        return all(made > os.stat(name).st_mtime for name in (__file__, *names))
    except FileNotFoundError:
        return False


def digest(facts: object, files: list[str]) -> str:
    """Return a name for what this file makes of others, by their names and contents."""
    found = hashlib.sha256(repr((facts, files)).encode())
    for file in (__file__, *files):
        found.update(hashlib.sha256(Path(file).read_bytes()).digest())
    return found.hexdigest()


extensions = [
    Extension(
        ".".join(path.with_suffix("").parts),
        sources_of(path),
        include_dirs=[np.get_include(), *folders],
        # cythonize copies them beside the C that it makes, where they are found first.
        depends=headers,
        define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")],
        extra_compile_args=[
            *FLAGS[build],
            *ARITHMETIC,
            "-MMD",
            *(kernel_flags if build == "sanitize" and path.parent.name == "kernels" else []),
        ],
        extra_link_args=["-fsanitize=address,undefined"] if build == "sanitize" else [],
    )
    for path in sorted(Path("moecache").rglob("_*.pyx"))
]

# The demo's model and host loop, so that `moecache demo` works from a wheel too.
examples = Path("examples")
model = [path.as_posix() for path in sorted((examples / "tiny_moe").glob("*")) if path.is_file()]


class BuildExtensions(build_ext):
    """Makes the C where it is compiled: metadata and a source distribution have no use for it.

    Each file of C is compiled by itself, if anything of it has changed: those of one module take
    as long as half of all others.
    """

    def finalize_options(self) -> None:
        """Use all cores, and keep the objects of builds apart: files in C have the same names."""
        super().finalize_options()
        # Of what setup() is told of it, an editable installation by pip knows nothing.
        self.parallel = self.parallel or num_cores
        self.build_temp = os.path.join(self.build_temp, build)

    def run(self) -> None:
        """Have each extension made of C."""
        folder = f"build/cython-{build}"
        # Cython's own cache has the paths of Cython in its names: pip's environments have others.
        sources = sorted(path.as_posix() for path in Path("moecache").rglob("*.p[yx][xd]"))
        name = digest(Cython.__version__, [*sources, *headers])
        saved = Path(cache, name) if cache else None
        if saved and saved.is_dir():
            # Newer than all that they are made of, so that none is made again.
            shutil.copytree(saved, folder, copy_function=shutil.copyfile, dirs_exist_ok=True)
        made = cythonize(
            self.extensions,
            build_dir=folder,
            nthreads=num_cores,
            compiler_directives={
                "language_level": 3,
                "boundscheck": checked,
                "wraparound": False,
                "initializedcheck": checked,
                "cdivision": True,
                # stubtest compares signatures: the stubs are the documentation of types.
                "embedsignature": False,
                "autotestdict": False,
                "auto_pickle": False,
            },
        )
        if saved and not saved.is_dir():
            passing = tempfile.mkdtemp(dir=saved.parent)
            shutil.copytree(folder, passing, dirs_exist_ok=True)
            try:
                os.rename(passing, saved)
            except OSError:  # another build was first
                shutil.rmtree(passing)
        by_name = {extension.name: extension for extension in made}
        for extension in self.extensions:
            extension.sources = by_name[extension.name].sources
            extension.depends = by_name[extension.name].depends
        super().run()

    def build_extensions(self) -> None:
        """Compile what has changed, as many files at once as there are cores; then link."""
        longest_first = sorted(self.extensions, key=lambda extension: -len(extension.sources))
        with ThreadPoolExecutor(self.parallel) as pool:
            compiled = [
                (
                    extension,
                    [pool.submit(self.compile, extension, file) for file in extension.sources],
                )
                for extension in longest_first
            ]
            try:
                for extension, files in compiled:
                    extension.extra_objects = [file.result() for file in files]
                    # What is left is to link, if an object is newer than the module.
                    extension.sources, extension.depends = [], extension.extra_objects
            finally:
                pool.shutdown(cancel_futures=True)
        super().build_extensions()

    def compile(self, extension: Extension, source: str) -> str:
        """Return the object of a file of C."""
        (target,) = self.compiler.object_filenames([source], output_dir=self.build_temp)
        if not self.force and is_current(Path(target)):
            return target
        saved = Path(cache, self.key(extension, source)) if cache else None
        if saved and saved.exists():
            os.makedirs(os.path.dirname(target), exist_ok=True)
            # What an earlier object was made of says nothing of this one.
            Path(target).with_suffix(".d").unlink(missing_ok=True)
            shutil.copyfile(saved, target)
            return target
        self.compiler.compile(
            [source],
            output_dir=self.build_temp,
            macros=extension.define_macros,
            include_dirs=extension.include_dirs,
            debug=self.debug,
            extra_postargs=extension.extra_compile_args,
        )
        if saved:
            passing = f"{saved}.{os.getpid()}"
            shutil.copyfile(target, passing)
            os.replace(passing, saved)
        return target

    def key(self, extension: Extension, source: str) -> str:
        """Return a name that another object than this one's would not have.

        All headers count: if one is missing where a build takes place, nothing is taken.
        """
        compiler, *flags = self.compiler.compiler_so
        asked = [compiler, "--version"]
        version = subprocess.run(asked, capture_output=True, check=False).stdout  # noqa: S603
        facts = [sys.version, np.__version__, version, flags, extension.extra_compile_args]
        facts.append(extension.define_macros)
        return digest(facts, [source, *headers]) + ".o"


# Workers that cythonize starts may import this file.
if __name__ == "__main__":
    setup(
        ext_modules=extensions,
        cmdclass={"build_ext": BuildExtensions},
        data_files=[
            ("share/moecache", [(examples / "numpy_loop.py").as_posix()]),
            ("share/moecache/tiny_moe", model),
            ("share/moecache/traces", [(examples / "traces" / "tiny_moe.npz").as_posix()]),
        ],
    )
