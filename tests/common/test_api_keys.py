"""Lists of API keys: what they hold, what is refused, and a file that changes."""

from pathlib import Path

import pytest

from orca_common.api_keys import ApiKeys, line_of, new_key, parse
from orca_common.errors import FailedPrecondition, Unauthenticated
from orca_common.priorities import Grant, Priority


def bearer(key: str) -> str:
    return f"Bearer {key}"


def test_a_key_names_its_tenant() -> None:
    key, other, unknown = new_key(), new_key(), new_key()
    keys = ApiKeys(f"{line_of('research', key)}, {line_of('shop', other)}", None)
    assert keys.tenant_of(bearer(key)) == "research"
    assert keys.tenant_of(f"bearer  {other}") == "shop"
    for wrong in (None, "", key, "Bearer ", bearer(unknown), bearer(key[:-1]), bearer("x" * 10_000), f"Basic {key}"):
        with pytest.raises(Unauthenticated) as refused:
            keys.tenant_of(wrong)
        assert key not in str(refused.value)


def test_a_key_says_what_its_tenant_may_ask_for() -> None:
    first, second = new_key(), new_key()
    keys = ApiKeys(f"{line_of('a', first)} priority=urgent weight=2.5\n{line_of('b', second)}", None)
    assert keys.tenant_of(bearer(first)) == "a"
    assert [keys.grant_of(tenant) for tenant in "ab"] == [Grant(Priority.URGENT, 2.5), Grant(Priority.NORMAL, 1.0)]
    for wrong in ("priority=first", "weight=-1", "weight=1e9", "weight=2 priority=low", "weight=x"):
        with pytest.raises(FailedPrecondition, match="line 1 is not"):
            parse(f"{line_of('a', first)} {wrong}", "keys")
    with pytest.raises(FailedPrecondition, match=r"must be at least 0\.001"):
        parse(f"{line_of('a', first)} weight=0.0009", "keys")
    with pytest.raises(FailedPrecondition, match="gives a another priority or weight"):
        parse(f"{line_of('a', first)} weight=2\n{line_of('a', second)}", "keys")


def test_without_keys_everybody_may_call() -> None:
    keys = ApiKeys(None, None)
    assert keys.tenant_of(None) == ""
    assert keys.grant_of("").highest is Priority.URGENT


def test_what_is_no_list_is_refused_and_never_shown() -> None:
    key = new_key()
    with pytest.raises(FailedPrecondition, match="line 2 is not") as refused:
        parse(f"# comment\nresearch {key}", "keys")
    assert key not in str(refused.value)
    with pytest.raises(FailedPrecondition, match="gives the key of a to b too"):
        parse(f"{line_of('a', key)}\n{line_of('b', key)}", "keys")
    with pytest.raises(FailedPrecondition, match="no name"):
        line_of("two words", key)
    with pytest.raises(FailedPrecondition, match="nobody could call"):
        ApiKeys("# none yet", None)
    with pytest.raises(FailedPrecondition, match="cannot be read"):
        ApiKeys(None, "/no/such/file")


def test_a_file_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    now = [0.0]
    old, new = new_key(), new_key()
    file = tmp_path / "keys"
    file.write_text(line_of("a", old) + "\n")
    keys = ApiKeys(None, str(file), clock=lambda: now[0])
    assert keys.tenant_of(bearer(old)) == "a"
    replace(file, line_of("a", new))
    assert keys.tenant_of(bearer(old)) == "a", "it looks once a second"
    now[0] = 2.0
    assert keys.tenant_of(bearer(new)) == "a"
    with pytest.raises(Unauthenticated):
        keys.tenant_of(bearer(old))
    with_setting = ApiKeys(line_of("b", old), str(file), clock=lambda: now[0])
    replace(file, line_of("c", new))
    now[0] = 3.0
    assert with_setting.tenant_of(bearer(new)) == "c"
    assert with_setting.tenant_of(bearer(old)) == "b", "the keys of the setting stay"
    replace(file, "broken")
    now[0] = 4.0
    assert with_setting.tenant_of(bearer(new)) == "c", "a broken change leaves the keys as they were"
    file.unlink()
    now[0] = 6.0
    assert with_setting.tenant_of(bearer(new)) == "c"


def replace(file: Path, text: str) -> None:
    """As an editor does, and as Kubernetes does with a link."""
    (file.parent / "new").write_text(text)
    (file.parent / "new").replace(file)
