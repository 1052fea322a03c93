"""Settings read from the environment."""

import logging
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from moecache.errors import ConfigError
from moecache.settings import OPTIONS, Settings, markdown_table


@pytest.fixture(autouse=True)
def _capture_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "moecache")


def test_a_silent_environment_leaves_everything_unset(caplog: pytest.LogCaptureFixture) -> None:
    """Defaults belong to the caller, so every field is None."""
    settings = Settings.from_environ({"PATH": "/bin", "moecache_memory": "4GiB"})

    assert all(getattr(settings, name) is None for name in OPTIONS)
    assert not caplog.records


def test_every_variable_reaches_its_field(caplog: pytest.LogCaptureFixture) -> None:
    """A field is filled from the variable of its name."""
    settings = Settings.from_environ(
        {
            "MOECACHE_MEMORY": "4GiB",
            "MOECACHE_POLICY": "lru",
            "MOECACHE_SCOPE": "layer",
            "MOECACHE_LOADER_THREADS": "3",
            "MOECACHE_EXPERT_STATS": "/tmp/report.txt",
            "MOECACHE_PREFAULT": "background",
            "MOECACHE_PREFETCH": "last",
        }
    )

    assert settings.memory == "4GiB"
    assert settings.policy == "lru"
    assert settings.scope == "layer"
    assert settings.loader_threads == 3
    assert settings.expert_stats == "/tmp/report.txt"
    assert settings.prefault == "background"
    assert settings.prefetch == "last"
    assert not caplog.records


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an argument os.environ is read."""
    monkeypatch.setenv("MOECACHE_POLICY", "slru")

    assert Settings.from_environ().policy == "slru"


def test_spaces_around_a_value_do_not_count() -> None:
    """A value quoted too widely in a shell script still works."""
    settings = Settings.from_environ({"MOECACHE_POLICY": " lru ", "MOECACHE_LOADER_THREADS": "2 "})

    assert (settings.policy, settings.loader_threads) == ("lru", 2)


@pytest.mark.parametrize("name", sorted(OPTIONS))
@pytest.mark.parametrize("text", ["", "  "])
def test_empty_counts_as_unset(caplog: pytest.LogCaptureFixture, name: str, text: str) -> None:
    """An emptied variable is the shell's way to unset one for a command."""
    settings = Settings.from_environ({f"MOECACHE_{name.upper()}": text})

    assert getattr(settings, name) is None
    assert not caplog.records


@pytest.mark.parametrize("text", ["two", "-1", "1.5", "0x2", "²", "٣", "1 2"])
def test_a_malformed_value_is_a_warning_with_variable_value_and_consequence(
    caplog: pytest.LogCaptureFixture, text: str
) -> None:
    """The reader learns what was wrong and what is used instead."""
    settings = Settings.from_environ({"MOECACHE_LOADER_THREADS": text})

    assert settings.loader_threads is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "MOECACHE_LOADER_THREADS" in record.getMessage()
    assert repr(text) in record.getMessage()
    assert "default" in record.getMessage()


def test_a_number_of_thousands_of_digits_is_malformed(caplog: pytest.LogCaptureFixture) -> None:
    """The limit of int() is a warning too, never an error of the caller."""
    settings = Settings.from_environ({"MOECACHE_LOADER_THREADS": "9" * 5000})

    assert settings.loader_threads is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("MOECACHE_MEMROY", "MOECACHE_MEMORY"),
        ("MOECACHE_POLICIES", "MOECACHE_POLICY"),
        ("MOECACHE_LOADER_THREAD", "MOECACHE_LOADER_THREADS"),
        ("MOECACHE_STATS", "MOECACHE_EXPERT_STATS"),
    ],
)
def test_an_unknown_name_is_a_warning_with_the_nearest_known_one(
    caplog: pytest.LogCaptureFixture, variable: str, nearest: str
) -> None:
    """A misspelt setting must not be silently without effect."""
    settings = Settings.from_environ({variable: "1"})

    assert settings == Settings()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert variable in record.getMessage()
    assert f"did you mean {nearest}?" in record.getMessage()


def test_an_unknown_name_like_no_other_lists_the_known_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without a near name the reader sees all of them."""
    Settings.from_environ({"MOECACHE_" + "QXZ" * 20: "1"})

    (record,) = caplog.records
    for option in OPTIONS.values():
        assert option.variable in record.getMessage()


def test_the_variable_of_the_build_is_no_setting(caplog: pytest.LogCaptureFixture) -> None:
    """What setup.py reads may stay set afterwards."""
    Settings.from_environ({"MOECACHE_BUILD": "sanitize", "MOECACHE_BUILD_CACHE": "kept"})

    assert not caplog.records


def test_one_bad_variable_does_not_touch_the_others(caplog: pytest.LogCaptureFixture) -> None:
    """Good values are taken next to malformed and unknown ones."""
    settings = Settings.from_environ(
        {"MOECACHE_LOADER_THREADS": "x", "MOECACHE_NOPE": "1", "MOECACHE_MEMORY": "1GiB"}
    )

    assert settings == Settings({"memory": "1GiB"})
    assert len(caplog.records) == 2


def test_settings_cannot_be_changed() -> None:
    """They are read once; a change would reach only some readers."""
    with pytest.raises(FrozenInstanceError):
        Settings().memory = "1GiB"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("variable", "value", "default"),
    [
        ("MEMORY", "lots", "what is free"),
        ("POLICY", "none", "echo"),
        ("SCOPE", "all", "global"),
    ],
)
def test_a_value_of_no_meaning_is_a_warning_with_the_default(
    variable: str, value: str, default: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A typing error in the environment does not stop a program."""
    settings = Settings.from_environ({f"MOECACHE_{variable}": value})

    assert settings == Settings()
    assert f"MOECACHE_{variable}='{value}' is not " in caplog.text
    assert f"using the default, {default}" in caplog.text


@pytest.mark.parametrize(
    ("text", "mode"),
    [("0", "off"), ("No", "off"), ("disabled", "off"), ("1", "force"), ("TRUE", "force"),
     ("on", "force"), ("Auto", "auto"), ("background", "background")],
)  # fmt: skip
def test_a_prefault_is_switched_by_many_words(
    text: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In any case; 0 is off and 1 is force."""
    assert Settings.from_environ({"MOECACHE_PREFAULT": text}).prefault == mode
    assert not caplog.records


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        *((mode, mode) for mode in ("auto", "echo", "hints", "last", "off")),
        *((word, "off") for word in ("0", "false", "No", "DISABLED", "OFF")),
        *((word, "auto") for word in ("1", "true", "on", "Yes", "enabled")),
        ("ECHO", "echo"),
    ],
)
def test_a_prefetch_is_switched_by_many_words(
    text: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In any case; on is auto."""
    assert Settings.from_environ({"MOECACHE_PREFETCH": text}).prefetch == mode
    assert not caplog.records


def test_a_prefetch_that_is_no_mode_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """It names what could be said, and what happens instead."""
    assert Settings.from_environ({"MOECACHE_PREFETCH": "psychic"}).prefetch is None
    assert "MOECACHE_PREFETCH='psychic' is not one of auto, echo, hints, last, off" in caplog.text
    assert "using the default, auto" in caplog.text


def test_an_argument_beats_the_environment_and_that_beats_the_default() -> None:
    """The origin of a value is known; the refusal of a wrong one names the choices."""
    settings = Settings.from_environ({"MOECACHE_READ": "direct"})
    assert settings.choose("read", "mmap") == ("mmap", "argument")
    assert settings.choose("read") == ("direct", "MOECACHE_READ")
    assert Settings().choose("read") == ("auto", "default")
    with pytest.raises(ConfigError, match="scope 'house' is not one of global, layer"):
        settings.choose("scope", "house")


def test_the_page_of_settings_has_the_table_of_options() -> None:
    """`python -c "from moecache.settings import *; print(markdown_table())"` prints it."""
    page = Path(__file__).parents[1] / "docs" / "settings.md"
    assert markdown_table() in page.read_text()
