"""The files of deploy/ are what docs/running.md says, and what the clusters' own schemas allow."""

from __future__ import annotations

import copy
import json
import os
import pwd
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hosts import Machines

from hvd_cluster.launch.cli.main import parse_args
from hvd_cluster.launch.hosts import Host, parse_hostfile

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SCHEMAS = Path(__file__).with_name("schemas")
MANIFESTS = {
    "mpijob.yaml": "mpijob.v2beta1.json",
    "jobset.yaml": "jobset.v1alpha2.json",
    "trainjob.yaml": "trainjob.v1alpha1.json",
    "rayjob.yaml": "rayjob.v1.json",
}


def manifest(name: str) -> Any:
    return yaml.safe_load((DEPLOY / "kubernetes" / name).read_text())


def schema(name: str) -> Any:
    return json.loads((SCHEMAS / name).read_text())


def test_every_manifest_has_a_schema() -> None:
    assert {path.name for path in (DEPLOY / "kubernetes").iterdir()} == set(MANIFESTS)
    for name in MANIFESTS.values():
        assert re.search(r"at commit [0-9a-f]{40}, version v\d", schema(name)["$comment"])


@pytest.mark.parametrize(("name", "of"), MANIFESTS.items())
def test_a_manifest_is_what_its_kind_allows(name: str, of: str) -> None:
    jsonschema.Draft202012Validator.check_schema(schema(of))
    jsonschema.validate(manifest(name), schema(of))


@pytest.mark.long
@pytest.mark.parametrize(("name", "of"), MANIFESTS.items())
def test_the_schemas_find_what_is_wrong(name: str, of: str) -> None:
    changed = copy.deepcopy(manifest(name))
    spec = changed["spec"]
    with_suspend = spec["runPolicy"] if changed["kind"] == "MPIJob" else spec
    with_suspend["suspend"] = True
    jsonschema.validate(changed, schema(of))
    with_suspend["suspend"] = "yes"
    with pytest.raises(jsonschema.ValidationError, match="'yes' is not of type 'boolean'"):
        jsonschema.validate(changed, schema(of))
    with_suspend["suspend"] = True
    spec["replicas"] = 2
    with pytest.raises(jsonschema.ValidationError, match="'replicas' was unexpected"):
        jsonschema.validate(changed, schema(of))


def test_the_launcher_of_the_mpi_operator_understands_its_hostfile_and_its_flags() -> None:
    replicas = manifest("mpijob.yaml")["spec"]["mpiReplicaSpecs"]
    (launcher,) = replicas["Launcher"]["template"]["spec"]["containers"]
    assert launcher["command"] == ["hvdrun"]
    parsed = parse_args(launcher["args"])
    assert (parsed.hostfile, parsed.command) == ("/etc/mpi/hostfile", ["python", "/work/train.py"])
    # What the operator writes for two workers with a slot each.
    text = "hvd-train-worker-0.hvd-train.default.svc slots=1\nhvd-train-worker-1.hvd-train.default.svc slots=1\n"
    assert parse_hostfile(text) == [Host(f"hvd-train-worker-{n}.hvd-train.default.svc", 1) for n in range(2)]
    (worker,) = replicas["Worker"]["template"]["spec"]["containers"]
    assert worker["command"] == ["/usr/sbin/sshd"]


def test_the_pods_of_the_jobset_agree_on_their_number_and_their_master() -> None:
    document = manifest("jobset.yaml")
    name = document["metadata"]["name"]
    (job,) = document["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    flags = dict(word[2:].split("=") for word in shlex.split(container["args"][0]) if word.startswith("--"))
    assert int(flags["nnodes"]) == spec["parallelism"] == spec["completions"]
    assert flags["master-addr"] == f"{name}-{job['name']}-0-0.{name}"
    assert int(flags["master-port"]) == container["ports"][0]["containerPort"]


def test_the_program_of_the_rayjob_asks_for_the_gpus_of_its_cluster() -> None:
    spec = manifest("rayjob.yaml")["spec"]
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    words = shlex.split(spec["entrypoint"])
    workers = int(words[words.index("--num-workers") + 1])
    assert workers == group["replicas"] * container["resources"]["limits"]["nvidia.com/gpu"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]
    # The example takes the same flags; its program fits into the place of /work/train.py.
    example = (ROOT / "examples" / "ray" / "torch_digits.py").read_text()
    assert all(f'"{word}"' in example for word in words if word.startswith("--"))
    pins = (ROOT / "constraints.txt").read_text()
    assert f"\nray=={spec['rayClusterSpec']['rayVersion']}\n" in pins


@pytest.mark.parametrize("script", ["slurm/train.sbatch", "lsf/train.bsub", "databricks_gpu/src/command.sh"])
def test_the_shell_finds_no_fault_in(script: str) -> None:
    check = ["shellcheck"] if shutil.which("shellcheck") else ["bash", "-n"]
    done = subprocess.run([*check, str(DEPLOY / script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def pip_lines(text: str) -> list[list[str]]:
    """The pip commands of a recipe."""
    return [shlex.split(line) for line in re.findall(r"^(?:RUN|   ) ?(pip .*)$", text, flags=re.MULTILINE)]


def test_docker_and_apptainer_install_the_same() -> None:
    docker = pip_lines((DEPLOY / "Dockerfile").read_text())
    assert docker == pip_lines((DEPLOY / "apptainer.def").read_text())
    assert docker[0][-1] == "/src"
    assert copied() == ["pyproject.toml", "README.md", "LICENSE", "hvd_cluster"]


def ssh_lines() -> list[str]:
    """The Dockerfile's commands that set up ssh."""
    return re.findall(r"(printf \S.* > /etc/ssh/\S+)", (DEPLOY / "Dockerfile").read_text())


def test_the_image_lets_sshd_take_keys_from_a_mounted_folder() -> None:
    assert r"printf 'StrictModes no\n' > /etc/ssh/sshd_config.d/hvd.conf" in ssh_lines()


@pytest.mark.slow
def test_the_images_sshd_takes_the_keys_of_a_secret(hosts: Callable[[int], Machines]) -> None:
    made = hosts(1)
    home = pwd.getpwuid(0).pw_dir
    # Debian's configuration and the image's; then the keys as the MPI Operator mounts them: 0600 in a folder of 1777.
    image = f"""
        set -e
        cp /etc/ssh/ssh_config {made.folder}
        mount -t tmpfs tmpfs /etc/ssh
        cp /usr/share/openssh/sshd_config {made.folder}/ssh_config /etc/ssh
        mkdir /etc/ssh/sshd_config.d /etc/ssh/ssh_config.d
        {chr(10).join(ssh_lines())}
        mount -t tmpfs -o mode=700 tmpfs {home}
        mkdir {home}/.ssh
        chmod 1777 {home}/.ssh
        install -m 600 {made.key} {home}/.ssh/id_ed25519
        install -m 600 {made.key}.pub {home}/.ssh/authorized_keys
    """
    made[0].shell(image)
    options = f"-p 2222 -h {made.folder}/host_key -E {made.folder}/image.log"
    made[0].shell(f"/usr/sbin/sshd {options}")  # it goes to the background, listening
    connect = f"ssh -F /etc/ssh/ssh_config -i {home}/.ssh/id_ed25519 -o BatchMode=yes -p 2222 127.0.0.1 echo in"
    said = made[0].shell(connect, check=False)
    assert said == "in\n", (made.folder / "image.log").read_text()


def copied() -> list[str]:
    """What the Dockerfile copies to /src."""
    lines = re.findall(r"^COPY (.*) /src/\S*$", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    return [name for line in lines for name in line.split()]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_images_pip_lines_work_where_there_is_no_compiler(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    source = tmp_path / "src"
    source.mkdir()
    for name in copied():
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, source / name)
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("sh", "env", "uname", "ldconfig", "cat"):  # what pip and torch may ask the system
        found = next((p for folder in ("/usr/bin", "/bin", "/sbin") if (p := Path(folder, tool)).exists()), None)
        if found is not None:
            (tools / tool).symlink_to(found)
    environ = {"PATH": f"{tmp_path}/venv/bin:{tools}", "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    environ.update(
        {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "HTTP", "http", "SSL"))}
    )
    for compiler in ("cc", "gcc", "g++", "clang", "nvcc", "cmake"):
        assert not any(Path(folder, compiler).exists() for folder in environ["PATH"].split(":"))
    for line in pip_lines((DEPLOY / "Dockerfile").read_text()):
        command = [str(source) if word == "/src" else word for word in line]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    script = (
        "import torch, hvd_cluster.torch as hvd; hvd.init(); print(hvd.allreduce(torch.ones(1)).item(), hvd.size())"
    )
    line = ["hvdrun", "-np", "2", "python", "-c", script]
    done = subprocess.run(line, env={**environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    assert sorted(done.stdout.splitlines()) == ["[0]<stdout>:1.0 2", "[1]<stdout>:1.0 2"], done.stderr
