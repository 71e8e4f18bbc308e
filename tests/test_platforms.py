"""``hvd.init()`` with the variables that each platform sets: two processes on this host stand for two nodes or tasks.

The names are those of the platforms' sources and documents: Kubeflow Trainer's ``pkg/constants``, MPI Operator's
controller, KubeRay's ``controllers/ray/utils/constant.go``, SageMaker's ``container_drivers/scripts/environment.py``,
Azure's "Distributed GPU training guide". Addresses are replaced by the loopback interface's.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from hvd_cluster.rendezvous.sockets import ReservedPort

DEPLOY = Path(__file__).parents[1] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
SCRIPT = """
import torch, hvd_cluster.torch as hvd
hvd.init()
total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()
print(f"rank {hvd.rank()} of {hvd.size()}, local {hvd.local_rank()} of {hvd.local_size()}: {total:g}", flush=True)
hvd.shutdown()
"""
_LAUNCHERS = (
    "HOROVOD",
    "OMPI",
    "PMI",
    "MPI_",
    "SLURM",
    "JSM",
    "PET_",
    "SM_",
    "TORCHELASTIC",
    "RANK",
    "WORLD_",
    "MASTER_",
)
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
SHARED_HOST = [f"rank {rank} of 2, local {rank} of 2: 3" for rank in range(2)]
#: As torchrun says it: two nodes of one rank.
TWO_NODES = [f"rank {rank} of 2, local 0 of 1: 3" for rank in range(2)]


def printed(command: Sequence[str], environments: Sequence[Mapping[str, str]], folder: Path) -> list[str]:
    """The lines of the ranks, sorted; the command runs once for each of the platform's environments."""
    return sorted(re.findall(r"rank \d of [^\n\[]*: \S+", "\n".join(outputs(command, environments, folder))))


def outputs(command: Sequence[str], environments: Sequence[Mapping[str, str]], folder: Path) -> list[str]:
    """What each process prints."""
    path = f"{Path(sys.executable).parent}:{CLEAN['PATH']}"
    shared = {**CLEAN, "PATH": path, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}  # torchrun leaves its logs behind
    started = [
        subprocess.Popen(
            command, env={**shared, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for environment in environments
    ]
    ended = [(process.communicate(timeout=90), process.returncode) for process in started]
    assert [code for _, code in ended] == [0] * len(ended), "\n".join(err for (_, err), _ in ended)
    return [out for (out, _), _ in ended]


def slurm(rank: str, _: str) -> dict[str, str]:
    """srun -N1 -n2."""
    return {
        "SLURM_JOB_ID": "1234",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank,
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_NNODES": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "node1",
        "SLURMD_NODENAME": "node1",
    }


def lsf(rank: str, _: str) -> dict[str, str]:
    """jsrun -n 2."""
    indices = {"RANK": rank, "SIZE": "2", "LOCAL_RANK": rank, "LOCAL_SIZE": "2"}
    return {
        "LSB_JOBID": "77",
        "LSB_DJOB_NUMPROC": "2",
        "PMIX_NAMESPACE": "77",
        "PMIX_RANK": rank,
        **{f"JSM_NAMESPACE_{name}": value for name, value in indices.items()},
    }


def open_mpi(rank: str, _: str) -> dict[str, str]:
    """mpirun -n 2, by Open MPI 5."""
    indices = {"RANK": rank, "SIZE": "2", "LOCAL_RANK": rank, "LOCAL_SIZE": "2", "NODE_RANK": rank}
    namespace = {"PMIX_NAMESPACE": "prterun-node1-77@1", "PMIX_RANK": rank}
    return {**namespace, **{f"OMPI_COMM_WORLD_{name}": value for name, value in indices.items()}}


def mpich(rank: str, _: str) -> dict[str, str]:
    """mpiexec -n 2, by Hydra."""
    return {"PMI_RANK": rank, "PMI_SIZE": "2", "PMI_FD": "7", "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": "2"}


def azureml(rank: str, port: str) -> dict[str, str]:
    """A job of ``distribution: {type: pytorch, process_count_per_instance: 1}`` on two instances."""
    rank_and_node = {"RANK": rank, "NODE_RANK": rank, "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    return {**rank_and_node, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "AZUREML_RUN_ID": "happy_yam_1"}


def azureml_mpi(rank: str, _: str) -> dict[str, str]:
    """A job of ``distribution: {type: mpi}``."""
    return {**open_mpi(rank, ""), "AZ_BATCHAI_MPI_MASTER_NODE": "10.0.0.4", "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"}


def sagemaker(rank: str, port: str) -> dict[str, str]:
    """A ModelTrainer with a plain command, on two instances."""
    return {
        "SM_HOSTS": '["algo-1", "algo-2"]',
        "SM_CURRENT_HOST": f"algo-{int(rank) + 1}",
        "SM_CURRENT_HOST_RANK": rank,
        "SM_HOST_COUNT": "2",
        "SM_MASTER_ADDR": "127.0.0.1",
        "SM_MASTER_PORT": port,
        "SM_NUM_GPUS": "0",
        "TRAINING_JOB_NAME": "job-1",
    }


def train_job(rank: str, port: str) -> dict[str, str]:
    """Kubeflow Trainer v2's torch plugin, with numNodes: 2; its pods are those of an indexed Job."""
    return {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": rank,
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": port,
        "JOB_COMPLETION_INDEX": rank,
    }


@pytest.mark.parametrize(
    "platform",
    [
        azureml,
        sagemaker,
        train_job,
        # tests/rendezvous/test_bootstrap.py runs these readers in `make test`.
        *(pytest.param(each, marks=pytest.mark.slow) for each in (slurm, lsf, open_mpi, mpich, azureml_mpi)),
    ],
)
def test_a_script_finds_its_ranks_on(platform: Any, tmp_path: Path) -> None:
    with ReservedPort() as reserved:
        environments = [platform(str(rank), str(reserved.port)) for rank in range(2)]
        assert printed([sys.executable, "-c", SCRIPT], environments, tmp_path) == SHARED_HOST


@pytest.mark.slow
def test_torch_distributed_shares_the_address(tmp_path: Path) -> None:
    group = "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n"
    script = f"{SCRIPT}{group}hvd.init(); hvd.shutdown()\n"  # after the first init(), before the second
    with ReservedPort() as reserved:
        environments = [azureml(str(rank), str(reserved.port)) for rank in range(2)]
        assert printed([sys.executable, "-c", script], environments, tmp_path) == SHARED_HOST


@pytest.mark.slow
def test_the_pods_of_the_trainjob_manifest_meet(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    trainer = yaml.safe_load((KUBERNETES / "trainjob.yaml").read_text())["spec"]["trainer"]
    assert trainer["args"] == ["/work/train.py"]
    with ReservedPort() as reserved:
        environments = [train_job(str(rank), str(reserved.port)) for rank in range(2)]
        assert environments[0]["PET_NNODES"] == str(trainer["numNodes"])
        assert environments[0]["PET_NPROC_PER_NODE"] == str(trainer["numProcPerNode"])
        assert printed([*trainer["command"], str(script)], environments, tmp_path) == TWO_NODES


def test_the_pods_of_the_jobset_manifest_meet(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    document = yaml.safe_load((KUBERNETES / "jobset.yaml").read_text())
    pod = document["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    shell, (line,) = pod["containers"][0]["command"], pod["containers"][0]["args"]
    with ReservedPort() as reserved:
        here = {"hvd-train-workers-0-0.hvd-train": "127.0.0.1", "29500": str(reserved.port)}
        for name, value in {**here, "/work/train.py": str(script)}.items():
            assert name in line
            line = line.replace(name, value)
        environments = [{"JOB_COMPLETION_INDEX": str(index)} for index in range(2)]
        assert printed([*shell, line], environments, tmp_path) == TWO_NODES


def test_the_launcher_of_the_mpi_operator_starts_the_ranks_of_its_hostfile(tmp_path: Path) -> None:
    script, hostfile = tmp_path / "train.py", tmp_path / "hostfile"
    script.write_text(SCRIPT)
    hostfile.write_text("localhost slots=2\n")
    document = yaml.safe_load((KUBERNETES / "mpijob.yaml").read_text())
    (launcher,) = document["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    here = {"/etc/mpi/hostfile": str(hostfile), "/work/train.py": str(script)}
    command = [here.get(word, word) for word in [*launcher["command"], *launcher["args"]]]
    assert set(here.values()) < set(command)
    operator = {
        "K_MPI_JOB_ROLE": "launcher",
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
        "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
        "OMPI_MCA_orte_set_default_slots": "1",
    }
    assert printed(command, [operator], tmp_path) == SHARED_HOST


@pytest.mark.slow
def test_the_command_of_a_job_on_databricks_gpus_runs_on_each_node(tmp_path: Path) -> None:
    source = DEPLOY / "databricks_gpu" / "src"
    with ReservedPort() as reserved:
        node = {"NUM_NODES": "2", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2", "CODE_SOURCE_PATH": str(source.parent)}
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserved.port)}
        environments = [{**node, **master, "NODE_RANK": str(rank)} for rank in range(2)]
        output = "\n".join(outputs(["bash", str(source / "command.sh")], environments, tmp_path))
    found = re.search(r"loss (\S+) on 2 workers", output)
    assert found, output
    assert float(found[1]) < 1e-3


FUNCTION = """
import torch, hvd_cluster.torch as hvd
def work():
    hvd.init()
    total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()
    return f"rank {hvd.rank()} of {hvd.size()}, local {hvd.local_rank()} of {hvd.local_size()}: {total:g}"
"""


@pytest.mark.slow
@pytest.mark.spark("local")  # the program has a session of its own
def test_barrier_tasks_on_databricks(tmp_path: Path) -> None:
    program = f"""{FUNCTION}
from pyspark.sql import SparkSession
import hvd_cluster.spark
SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
print(*hvd_cluster.spark.run(work, num_proc=2), sep="\\n")
"""
    runtime = {"DATABRICKS_RUNTIME_VERSION": "16.4", "DB_IS_DRIVER": "TRUE", "PYSPARK_PYTHON": sys.executable}
    assert printed([sys.executable, "-c", program], [runtime], tmp_path) == SHARED_HOST


@pytest.mark.slow
def test_the_job_of_a_kuberay_cluster(ray_cluster: Any, tmp_path: Path) -> None:
    program = f"""{FUNCTION}
from hvd_cluster.ray import RayExecutor
with RayExecutor(RayExecutor.create_settings(timeout_s=60), num_hosts=1, num_workers_per_host=2) as executor:
    print(*executor.run(work), sep="\\n")
"""
    head = {
        "RAY_ADDRESS": ray_cluster.address,
        "RAY_CLUSTER_NAME": "hvd-train",
        "RAY_USAGE_STATS_KUBERAY_IN_USE": "1",
        "KUBERAY_GEN_RAY_START_CMD": "ray start --head",
    }
    assert printed([sys.executable, "-c", program], [head], tmp_path) == SHARED_HOST
