"""Passwords in addresses: refused wherever a job could keep them, and shown nowhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.config.base import PlanError, hidden
from shardwright.config.load import job_of_fields, load_job
from shardwright.config.secret_addresses import has_password, password_faults
from shardwright.train.checkpoint.storage import PROTOCOLS, open_storage

SECRET = "hunter2"
ADDRESSES = [f"{protocol}://me:{SECRET}@host.example/x" for protocol in PROTOCOLS]
ADDRESSES += [
    f"https://me:{SECRET}/{SECRET}@host/x", f"s3://:{SECRET}@bucket", f"az://box/x?sig={SECRET}&a=1",
    f"s3://bucket/x?X-Amz-Signature={SECRET}", f"sftp://host/x;password={SECRET}", f"s3://b/x#access-token={SECRET}",
    f"s3://bucket/x?a=1&aws_secret_access_key={SECRET}", f"SFTP://me:{SECRET}@host:22/x",
    f"sftp://me@corp.example:{SECRET}@host/x", f"sftp://me:{SECRET} {SECRET}@host/x", f"sftp://me:{SECRET}'x@host/x",
    f"hdfs://host/x?a=1&delegation={SECRET}", f"sftp://me:22-{SECRET}@host/x", f"sftp://me:a@b@{SECRET}@host/x",
]  # fmt: skip
PLAIN = [
    "s3://bucket/run", "abfs://box@account.dfs.core.windows.net/run", "sftp://me@host/x", "hdfs://host:8020/a@b",
    "hdfs://[::1]:8020/a@b", "gs://bucket/a:b@c", "runs/a:b@c", "me:x@host", "https://host/x?signal=1/y", "memory://x",
    "hdfs://host:8020, or write to me@host",
]  # fmt: skip


FIELDS = ("run.folder", "data.path", "data.cache", "model.weights", "cluster.name")


@pytest.mark.parametrize(
    ("field", "address"),
    [*(("checkpoint.path", address) for address in ADDRESSES), *((field, ADDRESSES[-1]) for field in FIELDS)],
)
def test_no_field_has_a_password(field: str, address: str) -> None:
    """From an override, from fields, and in a list; with a way out, and alone, so that nothing else quotes it."""
    section, name = field.split(".")
    for make in (
        lambda: load_job("quickstart", [f'{field}="{address}"', "plan.tp=3", "nothing.at=all"]),
        lambda: job_of_fields({section: {name: address}}, [], "job x"),
    ):
        with pytest.raises(
            PlanError, match=rf"1 fault\n  1\. {field} .*\*\*\*.*has a password, which .*ssh"
        ) as refused:
            make()
        assert SECRET not in str(refused.value) + repr(refused.value.faults)
    assert len(password_faults({"data": {"sources": [{"path": address}, {"path": "x"}]}})) == 1


@pytest.mark.parametrize("address", ADDRESSES)
def test_no_storage_is_opened_with_a_password(address: str) -> None:
    """As in the address of a run that a command names."""
    with pytest.raises(PlanError, match=r"has a password; write it without") as refused:
        open_storage(address)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("address", PLAIN)
def test_addresses_without_are_taken(address: str) -> None:
    assert not has_password(address)
    assert hidden(address) == address or "?" in address


def test_no_message_shows_one() -> None:
    """Whatever quotes it: an option that is none, or the subject."""
    with pytest.raises(PlanError) as refused:
        load_job("quickstart", [f"checkpoint.path:sftp://me:{SECRET}@host"])
    assert "sftp://me:***@host" in str(refused.value)
    assert SECRET not in str(PlanError(f"run s3://me:{SECRET}@x", ["a fault"]))


@given(st.text("abz:/@?&=*.", max_size=80))
def test_what_is_hidden_stays_so(text: str) -> None:
    assert hidden(hidden(text)) == hidden(text)
    assert "://" in text or hidden(text) == text
