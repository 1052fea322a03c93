"""What tests report, as processes send it to one another."""

import json

import pytest


def test_a_report_with_a_lone_surrogate_can_be_sent(request: pytest.FixtureRequest) -> None:
    """As a damaged file's text has it, logged or raised: it is shown escaped."""
    report = pytest.TestReport(
        "a::b", ("a", 0, "b"), {}, "failed", "text \ud800", "call", [("log", "said \ud800")]
    )
    hook = request.config.hook.pytest_report_to_serializable
    data = hook(config=request.config, report=report)
    assert data["sections"] == [("log", "said \\ud800")]
    assert data["longrepr"] == "text \\ud800"
    json.dumps(data, ensure_ascii=False, default=str).encode()
