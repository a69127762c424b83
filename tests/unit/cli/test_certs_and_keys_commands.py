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
from baton.security.keys import KeyRing, read_keys
from baton.security.matrix import CallerRole
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
    assert [entry.tenant for entry in read_keys(Path(file))] == ["default"]
    assert main(["keys", "revoke", file, "00000000"]) == ExitCode.NOT_FOUND
    capsys.readouterr()
    assert main(["keys", "list", file]) == 0
    assert capsys.readouterr().out.split()[:6] == ["ID", "TENANT", "ROLE", "MAX", "PRIORITY", "CREATED"]
    assert main(["keys", "add", file, "--tenant", "a/b"]) == ExitCode.BAD_CONFIG
    assert main(["keys", "add", file, "--role", "router"]) == ExitCode.USAGE
    assert main(["keys", "list", str(tmp_path / "none")]) == ExitCode.BAD_CONFIG


def test_the_redis_user_may_access_only_the_keys_of_one_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "redis-user", "--cluster", "blue"]) == 0
    output = capsys.readouterr()
    words = output.out.split()
    assert words[:3] == ["ACL", "SETUSER", "baton"]
    assert {"~baton:blue:*", "&baton:blue:*", "-@all"} <= set(words)
    password = next(word[1:] for word in words if word.startswith(">"))
    assert password in output.err
