"""`baton certs` and `baton keys`, and the contents of the certificates."""

from __future__ import annotations

import json
import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509

from baton.cli.main import main
from baton.errors import ConfigError, ExitCode
from baton.security.keys import KeyRing, read_key_file
from baton.security.matrix import CallerRole
from baton.security.quotas import Quotas, TenantSettings
from baton.security.tls_files import TlsFiles, certificate_files


def names_in(certificate: Path) -> list[str]:
    found = x509.load_pem_x509_certificate(certificate.read_bytes())
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names]


def test_certificates_for_every_role(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certs = tmp_path / "certs"
    assert main(["certs", "init", str(certs), "--hosts", "gpu-1, 10.0.0.5", "--cluster", "blue"]) == 0
    output = capsys.readouterr().out
    assert {path.name for path in certs.iterdir()} == {
        *("ca.crt", "ca.key", "router.crt", "router.key", "node.crt", "node.key", "operator.crt", "operator.key")
    }
    assert all(str(path) in output for path in certs.iterdir())
    assert {stat.S_IMODE(path.stat().st_mode) for path in certs.iterdir()} == {0o600}
    for role in ("router", "node"):
        names = names_in(certs / f"{role}.crt")
        assert {f"{role}.blue.baton", "localhost", "127.0.0.1", "gpu-1", "10.0.0.5"} <= set(names)
    assert names_in(certs / "operator.crt") == ["operator.blue.baton"]
    for role in ("router", "node", "operator"):
        certificate_files(certs, role).read()


def test_a_second_call_keeps_the_authority(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certs", "init", str(tmp_path)]) == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert main(["certs", "init", str(tmp_path), "--hosts", "new.example"]) == 0
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {name for name in after if after[name] == before[name]} == {"ca.crt", "ca.key"}
    assert "new.example" in names_in(tmp_path / "router.crt")
    (tmp_path / "ca.key").unlink()
    capsys.readouterr()
    assert main(["certs", "init", str(tmp_path)]) == ExitCode.BAD_CONFIG
    assert "has no ca.crt with its ca.key" in capsys.readouterr().err


def test_files_that_do_not_match_are_named_in_the_error(tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert main(["certs", "init", str(tmp_path / name)]) == 0
    one, two = (certificate_files(tmp_path / name, "node") for name in ("one", "two"))
    garbage = tmp_path / "garbage"
    garbage.write_text("no certificate")
    for wrong, message in (
        (TlsFiles(one.ca, one.cert, two.key), "not a certificate and its key"),
        (TlsFiles(garbage, one.cert, one.key), "garbage holds no certificate"),
        (TlsFiles(one.ca, garbage, one.key), "not a certificate and its key"),
        (TlsFiles(tmp_path / "missing", one.cert, one.key), "missing can't be read"),
    ):
        with pytest.raises(ConfigError, match=message):
            wrong.read()
    assert one.server_context().minimum_version >= ssl.TLSVersion.TLSv1_2
    with pytest.raises(ValueError, match="go together"):
        TlsFiles.of(one.cert, None, one.ca)


def test_a_key_is_created_listed_and_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "keys.json")
    assert main(["keys", "add", file, "--tenant", "acme", "--max-concurrent", "7"]) == 0
    output = capsys.readouterr()
    key = output.out.strip()
    assert key not in output.err
    assert main(["keys", "add", file, "--role", "operator", "--min-priority", "-3"]) == 0
    operator = capsys.readouterr().out.strip()
    ring = KeyRing(Path(file))
    assert (ring.caller(key, 0.0).tenant, ring.caller(key, 0.0).max_concurrent) == ("acme", 7)
    assert (ring.caller(operator, 0.0).role, ring.caller(operator, 0.0).min_priority) == (CallerRole.OPERATOR, -3)
    assert main(["keys", "list", file, "-o", "json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["tenant"] for entry in listed["keys"]] == ["acme", "default"]
    assert [entry["min_priority"] for entry in listed["keys"]] == [None, -3]
    assert main(["keys", "revoke", file, listed["keys"][0]["id"]]) == 0
    assert [entry.tenant for entry in read_key_file(Path(file)).keys] == ["default"]
    assert main(["keys", "revoke", file, "00000000"]) == ExitCode.NOT_FOUND
    capsys.readouterr()
    assert main(["keys", "list", file]) == 0
    assert capsys.readouterr().out.split()[:6] == ["ID", "TENANT", "ROLE", "CLASS", "MAX", "PRIORITY"]
    assert main(["keys", "add", file, "--tenant", "a/b"]) == ExitCode.BAD_CONFIG
    assert main(["keys", "add", file, "--role", "router"]) == ExitCode.USAGE
    assert main(["keys", "list", str(tmp_path / "none")]) == ExitCode.BAD_CONFIG


def test_limits_are_given_changed_and_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "keys.json")
    words = ["--tenant", "acme", "--weight", "3", "--class", "urgent", "--tokens-per-minute", "1000"]
    assert main(["keys", "add", file, *words]) == 0
    assert main(["keys", "set", file, "--tenant", "acme", "--requests-per-minute", "60", "--max-concurrent", "8"]) == 0
    (key_id,) = (key.key_id for key in read_key_file(Path(file)).keys)
    changes = ["--class", "none", "--min-priority", "-5", "--max-concurrent-of-key", "2"]
    assert main(["keys", "set", file, "--key", key_id, *changes]) == 0
    assert main(["keys", "add", file, "--tenant", "acme"]) == 0
    found = read_key_file(Path(file))
    assert found.tenants == {"acme": TenantSettings(3.0, Quotas(max_concurrent=8, requests_per_minute=60))}
    changed = found.keys[0]
    assert (changed.service_class, changed.min_priority) == (None, -5)
    assert changed.quotas == Quotas(max_concurrent=2, tokens_per_minute=1000)
    capsys.readouterr()
    assert main(["keys", "list", file, "-o", "json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["tenants"]["acme"]["requests_per_minute"] == 60
    assert (listed["keys"][0]["tokens_per_minute"], listed["keys"][0]["max_concurrent_of_key"]) == (1000, 2)
    assert main(["keys", "list", file]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["acme", "3", "8", "60", "-", "-"]
    nothing = ["--weight", "none", "--requests-per-minute", "none", "--max-concurrent", "none"]
    assert main(["keys", "set", file, "--tenant", "acme", *nothing]) == 0
    assert "tenants" not in json.loads(Path(file).read_text())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--weight", "3"], "either --tenant NAME or --key ID"),
        (["--tenant", "acme", "--key", "x", "--weight", "3"], "either --tenant NAME or --key ID"),
        (["--tenant", "acme"], "nothing is changed: give one of --weight"),
        (["--tenant", "acme", "--class", "batch"], "--class is for --key"),
        (["--key", "x", "--weight", "2"], "--weight is for --tenant"),
        (["--tenant", "acme", "--weight", "0.001"], "--weight must be a number of 0.01 to 1000, or none, not '0.001'"),
        (["--tenant", "acme", "--weight", "nan"], "--weight must be"),
        (["--tenant", "acme", "--tokens-per-day", "0"], "--tokens-per-day must be a whole number of 1 to"),
        (["--tenant", "acme", "--tokens-per-day", "1.5"], "--tokens-per-day must be a whole number of 1 to"),
        (["--tenant", "umbrella", "--weight", "2"], "has no key of tenant 'umbrella'"),
        (["--key", "00000000", "--class", "batch"], "has no key '00000000'"),
    ],
)
def test_a_wrong_change_is_refused_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    file = str(tmp_path / "keys.json")
    assert main(["keys", "add", file, "--tenant", "acme"]) == 0
    before = Path(file).read_text()
    assert main(["keys", "set", file, *words]) in (ExitCode.USAGE, ExitCode.NOT_FOUND)
    assert said in capsys.readouterr().err
    assert Path(file).read_text() == before


def test_the_redis_user_may_access_only_the_keys_of_one_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "redis-user", "--cluster", "blue"]) == 0
    output = capsys.readouterr()
    words = output.out.split()
    assert words[:3] == ["ACL", "SETUSER", "baton"]
    assert {"~baton:blue:*", "&baton:blue:*", "-@all"} <= set(words)
    password = next(word[1:] for word in words if word.startswith(">"))
    assert password in output.err
