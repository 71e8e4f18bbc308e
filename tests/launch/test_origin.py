from __future__ import annotations

import textwrap

import cloudpickle

from hvd_cluster.launch.origin import is_ours, is_users


def test_files_are_told_apart() -> None:
    ours = is_users.__code__.co_filename
    assert is_ours(ours)
    assert not is_users(ours)
    assert is_users(__file__)
    assert is_users("<ipython-input-3>")
    for library in (textwrap.__file__, cloudpickle.__file__, "<frozen runpy>"):
        assert not is_users(library)
        assert not is_ours(library)
