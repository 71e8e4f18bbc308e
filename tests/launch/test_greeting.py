from __future__ import annotations

import pytest

from hvd_cluster.launch.greeting import Greeting


def test_a_greeting_is_one_line_that_does_not_show_its_secret() -> None:
    greeting = Greeting(name="b\n", addresses=["10.0.0.1"], port=7, secret="5ec2e7", cwd="/a b", sys_path=["", "/x"])
    line = greeting.to_line()
    assert line.count(b"\n") == 1
    assert Greeting.from_line(line) == greeting
    assert Greeting.from_line(b'{"more": 1, ' + line[1:]) == greeting  # a newer launcher's
    assert "5ec2e7" not in repr(greeting)
    with pytest.raises(ValueError, match="no JSON object"):
        Greeting.from_line(b"7\n")
