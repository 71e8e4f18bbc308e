from __future__ import annotations

import textwrap

import cloudpickle

from hvd_cluster.launch.frame_origin import is_own_package, is_user_code


def test_files_are_told_apart() -> None:
    ours = is_user_code.__code__.co_filename
    assert is_own_package(ours)
    assert not is_user_code(ours)
    assert is_user_code(__file__)
    assert is_user_code("<ipython-input-3>")
    for library in (textwrap.__file__, cloudpickle.__file__, "<frozen runpy>"):
        assert not is_user_code(library)
        assert not is_own_package(library)
