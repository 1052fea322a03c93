"""Table: the results of a sweep, a row per replay."""

import csv
import html
import io
import json
import os
from collections.abc import Iterable, Iterator
from typing import Any, overload

from moecache.errors import ConfigError, MissingDependencyError
from moecache.files import Kind, write_whole
from moecache.study._arguments import BELADY, parse_capacity

COLUMNS = (
    "trace",
    "model",
    "policy",
    "scope",
    "capacity",
    "fraction",
    "num_accesses",
    "num_hits",
    "hit_rate",
    "miss_ratio",
    "gap_share",
    "prefill_hit_rate",
    "decode_hit_rate",
    "seconds",
)
_HEADER = f"{','.join(COLUMNS)}\n".encode()
CSV_FILE = Kind("a table of replays", lambda data: data.startswith(_HEADER))
PARQUET_FILE = Kind("a Parquet file", lambda data: data.startswith(b"PAR1"))
_JSON_FILE = Kind(
    "a list of replays", lambda data: data.startswith((b'[\n {\n  "trace": ', b"[]\n"))
)


class Table:
    """Rows of a sweep. `len`, iteration and indices give rows, each a dict of `COLUMNS`.

    | column | |
    |-|-|
    | `trace`, `model` | what the sweep calls the trace; its model or None |
    | `policy`, `scope` | |
    | `capacity`, `fraction` | slots, and their share of all experts |
    | `num_accesses`, `num_hits`, `hit_rate`, `miss_ratio` | |
    | `gap_share` | (hit rate - LRU's) / (Belady's - LRU's); None if either is missing, or no gap |
    | `prefill_hit_rate`, `decode_hit_rate` | of steps all of whose rows are; None without any |
    | `seconds` | what the replay took |

    Attributes
    ----------
    rows : list of dict
    per_layer : list of (list of float, or None)
        Hit rates of each row's layers, in the rows' order; None if the rows did not come from
        a sweep. In no file: it is no column.
    """

    def __init__(self, rows: Iterable[dict[str, Any]]) -> None:
        given = list(rows)
        self.rows = [{name: row.get(name) for name in COLUMNS} for row in given]
        self.per_layer: list[list[float] | None] = [row.get("per_layer") for row in given]

    @classmethod
    def join(cls, tables: "Iterable[Table]") -> "Table":
        """Return one table of several tables' rows."""
        return cls(
            {**row, "per_layer": rates}
            for table in tables
            for row, rates in zip(table.rows, table.per_layer, strict=True)
        )

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the rows."""
        return iter(self.rows)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> "Table": ...
    @overload
    def __getitem__(self, index: str) -> list[Any]: ...
    def __getitem__(self, index: int | slice | str) -> Any:
        """Return a row, some rows as a table, or a column by its name."""
        if isinstance(index, str):
            if index not in COLUMNS:
                raise ConfigError(f"column {index!r} is not one of {', '.join(COLUMNS)}")
            return [row[index] for row in self.rows]
        if isinstance(index, slice):
            return Table(self._with_layers(range(len(self))[index]))
        return self.rows[index]

    def select(self, **values: Any) -> "Table":
        """Return the rows that have these values: ``table.select(policy="lru")``.

        `capacity` may be a share, "25%" or 0.25, too.
        """
        for name in values:
            if name not in COLUMNS:
                raise ConfigError(f"column {name!r} is not one of {', '.join(COLUMNS)}")
        return Table(
            self._with_layers(
                number
                for number, row in enumerate(self.rows)
                if all(
                    row[name] == (_slots(value, row) if name == "capacity" else value)
                    for name, value in values.items()
                )
            )
        )

    def best(self, **values: Any) -> dict[str, Any]:
        """Return the row with the highest hit rate among those that `select` gives.

        Belady's is no choice: it knows the future. The first one of equals.

        Raises
        ------
        ConfigError
            If there is no such row.
        """
        rows = [row for row in self.select(**values) if row["policy"] != BELADY]
        if not rows:
            asked = ", ".join(f"{name}={value!r}" for name, value in values.items())
            raise ConfigError(f"the table has no policy's row with {asked or 'anything'}")
        return max(rows, key=lambda row: row["hit_rate"])

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame; needs the extra `study`."""
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingDependencyError(
                "Table.to_pandas needs pandas; install it with: pip install 'moecache[study]'"
            ) from error
        return pd.DataFrame(self.rows, columns=list(COLUMNS))

    def to_csv(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write the table as CSV with a header; None is an empty field.

        Another table is replaced, anything else only with `force`.
        """
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        data = text.getvalue().encode(errors="backslashreplace")
        write_whole(path, data, CSV_FILE, force=force)

    def to_json(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write the rows as a JSON list of objects; see `to_csv` for what is replaced."""
        data = (json.dumps(self.rows, indent=1, allow_nan=False) + "\n").encode()
        write_whole(path, data, _JSON_FILE, force=force)

    def to_parquet(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write the table as Parquet; needs pandas and pyarrow. See `to_csv`."""
        try:
            import pandas as pd  # noqa: F401
            import pyarrow as pa  # noqa: F401
        except ImportError as error:
            raise MissingDependencyError(
                "Table.to_parquet needs pandas and pyarrow; install them with: "
                "pip install 'moecache[study]'"
            ) from error
        data = io.BytesIO()
        self.to_pandas().to_parquet(data, engine="pyarrow", index=False)
        write_whole(path, data.getvalue(), PARQUET_FILE, force=force)

    def pivot(self) -> str:
        """Return hit rates as text: per trace and scope, policies by capacities.

        The best of a column has a star; Belady's, the bound, stands last.
        """
        blocks = []
        for (trace, scope), block in groups(self.rows):
            capacities, policies, rates = block
            width = max(len(policy) for policy in policies)
            heads = [f"{slots} ({share:.3g}%)" for slots, share in capacities]
            lines = [f"{trace}, scope {scope}", " ".join([" " * width, *heads])]
            bests = best_of(policies, [slots for slots, _ in capacities], rates)
            for policy in policies:
                cells = []
                for (slots, _), head in zip(capacities, heads, strict=True):
                    rate = rates.get((policy, slots))
                    star = "*" if rate is not None and rate == bests.get(slots) else " "
                    star = " " if policy == BELADY else star
                    shown = "-" if rate is None else f"{rate:.3f}"
                    cells.append(f"{shown}{star}".rjust(len(head)))
                lines.append(" ".join([policy.ljust(width), *cells]).rstrip())
            blocks.append("\n".join(lines))
        return "\n\n".join(blocks) or "no rows"

    def _with_layers(self, numbers: Iterable[int]) -> Iterator[dict[str, Any]]:
        for number in numbers:
            yield {**self.rows[number], "per_layer": self.per_layer[number]}

    def __repr__(self) -> str:
        return f"<Table of {len(self)} replays>"

    def _repr_html_(self) -> str:
        parts = []
        for (trace, scope), (capacities, policies, rates) in groups(self.rows):
            bests = best_of(policies, [slots for slots, _ in capacities], rates)
            head = "".join(f"<th>{slots} ({share:.3g}%)</th>" for slots, share in capacities)
            body = ""
            for policy in policies:
                cells = ""
                for slots, _ in capacities:
                    rate = rates.get((policy, slots))
                    shown = "" if rate is None else f"{rate:.3f}"
                    if rate is not None and rate == bests.get(slots) and policy != BELADY:
                        shown = f"<b>{shown}</b>"
                    cells += f"<td>{shown}</td>"
                body += f"<tr><th>{html.escape(policy)}</th>{cells}</tr>"
            caption = html.escape(f"{trace}, scope {scope}: hit rates")
            parts.append(
                f"<table><caption>{caption}</caption><tr><th></th>{head}</tr>{body}</table>"
            )
        return "".join(parts) or "<p>no rows</p>"


Block = tuple[list[tuple[int, float]], list[str], dict[tuple[str, int], float]]


def groups(rows: Iterable[dict[str, Any]]) -> Iterator[tuple[tuple[str, str], Block]]:
    """Yield (trace, scope) and its capacities with percentages, policies and hit rates."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["trace"], row["scope"]), []).append(row)
    for key, block in found.items():
        capacities = sorted({(row["capacity"], 100 * row["fraction"]) for row in block})
        names = dict.fromkeys(row["policy"] for row in block)
        policies = [name for name in names if name != BELADY]
        policies += [BELADY] * (BELADY in names)
        rates = {(row["policy"], row["capacity"]): row["hit_rate"] for row in block}
        yield key, (capacities, policies, rates)


def best_of(
    policies: Iterable[str], capacities: Iterable[int], rates: dict[tuple[str, int], float]
) -> dict[int, float]:
    """Return the highest hit rate at each capacity, Belady's aside."""
    real = [policy for policy in policies if policy != BELADY]
    return {
        slots: max((rates[policy, slots] for policy in real if (policy, slots) in rates), default=0)
        for slots in capacities
    }


def _slots(capacity: Any, row: dict[str, Any]) -> int:
    # A row does not say how many experts there are, but its share does.
    total = round(row["capacity"] / row["fraction"])
    return min(total, parse_capacity(capacity, total))
