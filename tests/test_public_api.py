"""What `import moecache` gives, and what it costs."""

import subprocess
import sys
from types import ModuleType

import moecache

IMPORTED_SUBMODULES = {
    *("compute", "errors", "experts", "prefault", "sizing", "study", "telemetry", "units"),
}


def test_all_lists_the_public_names() -> None:
    """`__all__` is sorted and equals the public names that are not stray submodules."""
    public = {
        name
        for name, value in vars(moecache).items()
        if not name.startswith("_")
        and (not isinstance(value, ModuleType) or name in IMPORTED_SUBMODULES)
    }
    assert moecache.__all__ == sorted(moecache.__all__)
    # Imported when it is asked for.
    assert set(moecache.__all__) == public | {"study"}
    assert set(moecache.__all__) <= set(dir(moecache))


def test_the_studys_names_are_public_too() -> None:
    """`moecache.study.__all__` is sorted, and each name is there and documented."""
    names = moecache.study.__all__

    assert names == sorted(names)
    assert all(getattr(moecache.study, name).__doc__ for name in names)


def test_every_public_object_is_documented() -> None:
    """Each public name has a docstring, and so have the methods of public classes."""
    for name in moecache.__all__:
        value = getattr(moecache, name)
        assert value.__doc__, name
        if isinstance(value, type):
            for attribute, member in vars(value).items():
                if not attribute.startswith("_") and callable(member):
                    assert member.__doc__, f"{name}.{attribute}"


def test_import_needs_numpy_and_nothing_else() -> None:
    """A bare interpreter with NumPy alone imports the package."""
    code = (
        "import sys\n"
        "for name in ('ml_dtypes', 'psutil', 'rich', 'torch', 'transformers', 'cupy'):\n"
        "    sys.modules[name] = None\n"
        "import moecache\n"
        "moecache.ExpertCache(2, 4, 3)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_import_leaves_the_study_for_later() -> None:
    """What studies traces is imported with the first use of it: a fifth of the time."""
    code = (
        "import sys, moecache\n"
        "assert not [name for name in sys.modules if name.startswith('moecache.study')]\n"
        "assert 'multiprocessing' not in sys.modules\n"
        "assert callable(moecache.study.replay)\n"
        "from moecache import *\n"
        "assert study is moecache.study\n"
        "assert not hasattr(moecache, 'studies')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_errors_form_one_tree() -> None:
    """Every exception is a MoeCacheError and what its name promises."""
    assert issubclass(moecache.ConfigError, moecache.MoeCacheError)
    assert issubclass(moecache.ConfigError, ValueError)
    assert issubclass(moecache.CapacityError, ValueError)
    assert issubclass(moecache.MissingDependencyError, ImportError)
    assert issubclass(moecache.FormatError, moecache.StoreError)
    assert issubclass(moecache.FormatError, ValueError)
    assert issubclass(moecache.ExpertNotFoundError, LookupError)
    for name in vars(moecache.errors):
        value = getattr(moecache.errors, name)
        if isinstance(value, type):
            assert issubclass(value, moecache.MoeCacheError)
