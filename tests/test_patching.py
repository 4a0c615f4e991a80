"""Attributes that are replaced for a while."""

import pytest

from shared.patching import replacing


class Base:
    inherited = 1


class Owner(Base):
    own, none = 2, None


def test_all_is_as_it_was_afterwards():
    before = dict(vars(Owner))
    with replacing() as replace:
        for name in ("inherited", "own", "none", "own"):
            replace(Owner, name, "new")
        assert (Owner.inherited, Owner.own, Owner.none) == ("new", "new", "new")
    assert dict(vars(Owner)) == before
    assert Owner.inherited == 1


def replace_what_cannot_be():
    with replacing() as replace:
        replace(Owner, "own", "new")
        replace(int, "real", 1)


def test_an_exception_puts_back_what_was_replaced_and_goes_through():
    before = dict(vars(Owner))
    with pytest.raises(TypeError, match="int"):
        replace_what_cannot_be()
    assert dict(vars(Owner)) == before
