from __future__ import annotations

import pytest

from hvd_cluster.launch.wire.agent_messages import BootstrapMessage


def test_a_bootstrap_message_is_one_line_that_does_not_show_its_secret() -> None:
    bootstrap = BootstrapMessage(
        name="b\n", addresses=["10.0.0.1"], port=7, secret="5ec2e7", cwd="/a b", sys_path=["", "/x"]
    )
    line = bootstrap.to_line()
    assert line.count(b"\n") == 1
    assert BootstrapMessage.from_line(line) == bootstrap
    assert BootstrapMessage.from_line(b'{"more": 1, ' + line[1:]) == bootstrap  # a newer launcher's
    assert "5ec2e7" not in repr(bootstrap)
    with pytest.raises(ValueError, match="not a JSON object"):
        BootstrapMessage.from_line(b"7\n")
