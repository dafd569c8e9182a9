"""Diagnoses of machines, which are folders that stand for their parts."""

import json
import os
import sys
from types import SimpleNamespace

import pytest

from sd_tpu import cli, doctor
from sd_tpu.cli import doctor as command
from sd_tpu.doctor import Device, diagnose
from tests.support.processes import told_by

CPU, TPU, GPU = Device("cpu", "cpu"), Device("TPU v5 lite", "tpu", 2**34), Device("H100", "gpu")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine without accelerators, whose parts are folders that tests fill."""
    for name in ("dev", "pci", "proc", "data", "cache"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(doctor, "DEVICES", tmp_path / "dev")
    monkeypatch.setattr(doctor, "PCI", tmp_path / "pci")
    monkeypatch.setattr(doctor, "PROCESSES", tmp_path / "proc")
    monkeypatch.setattr(doctor, "LOCK", tmp_path / "lock")
    for variable in ("JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR", "TPU_WORKER_HOSTNAMES"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "LEAST_DISK", 0)
    monkeypatch.setattr(doctor, "find_libtpu", lambda: SimpleNamespace(get_library_path=str))
    return tmp_path


@pytest.fixture
def tpu(machine):
    """A machine with a TPU v5e."""
    (machine / "pci" / "0000:00:04.0").mkdir()
    (machine / "pci" / "0000:00:04.0" / "vendor").write_text("0x1ae0\n")
    (machine / "pci" / "0000:00:04.0" / "device").write_text("0x0063\n")
    (machine / "dev" / "vfio").mkdir()
    (machine / "dev" / "vfio" / "0").touch()
    return machine


def problems(*devices, **options):
    return diagnose(devices, hub=False, **options).problems


def problem(*devices, **options):
    (found,) = problems(*devices, **options)
    return found


@pytest.mark.parametrize("device", [CPU, TPU, GPU])
def test_nothing_is_wrong_where_all_is_used(machine, device):
    assert problems(device) == []


def test_a_network_card_of_googles_is_no_tpu(machine):
    (machine / "pci" / "0").mkdir()
    (machine / "pci" / "0" / "vendor").write_text("0x1ae0\n")
    (machine / "pci" / "0" / "device").write_text("0x0042\n")
    assert problems(CPU) == []


def test_a_tpu_without_support_is_told_what_to_install(tpu, monkeypatch):
    monkeypatch.setattr(doctor, "find_libtpu", lambda: None)
    assert 'pip install "jax[tpu]"' in problem(CPU)
    assert problems(TPU) == []


def test_jax_that_was_told_to_use_something_else(tpu, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert "JAX_PLATFORMS=cpu keeps JAX from it: unset it." in problem(CPU)
    monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
    assert "JAX_PLATFORMS" not in problem(CPU)


def test_a_libtpu_that_another_package_replaced(tpu, monkeypatch):
    monkeypatch.setattr(doctor, "find_libtpu", lambda: SimpleNamespace())
    assert "pip uninstall tensorflow-tpu" in problem(CPU)


def test_the_process_that_holds_the_chips_is_named(tpu):
    opened = tpu / "proc" / "417" / "fd"
    opened.mkdir(parents=True)
    (opened / "5").symlink_to("/dev/vfio/0")
    (tpu / "proc" / "417" / "comm").write_text("python3\n")
    mine = tpu / "proc" / str(os.getpid()) / "fd"
    mine.mkdir(parents=True)
    (mine / "5").symlink_to("/dev/vfio/0")
    assert "holds the TPU's chips: 417 (python3). End it" in problem(CPU)


def test_the_public_is_told_of_no_paths_and_no_processes(tpu, monkeypatch):
    test_the_process_that_holds_the_chips_is_named(tpu)
    assert "417" not in problem(CPU, public=True, failure="held by 417")
    monkeypatch.setattr(doctor, "find_libtpu", lambda: None)
    assert sys.prefix in problem(CPU) and sys.prefix not in problem(CPU, public=True)
    assert os.uname().release not in diagnose([CPU], hub=False, public=True).system


def test_anothers_process_that_holds_the_chips(tpu):
    told = "Unable to initialize backend 'tpu': ABORTED: The TPU is already in use by process 4."
    assert "sudo lsof -w /dev/accel*" in problem(CPU, failure=told)


@pytest.mark.skipif(os.access("/", os.W_OK), reason="root may write everything")
def test_anothers_lock_is_to_be_removed(tpu):
    (tpu / "lock").touch(mode=0o400)
    assert f"`sudo rm {tpu / 'lock'}`" in problem(CPU)


def test_chips_without_their_devices(tpu):
    (tpu / "dev" / "vfio" / "0").unlink()
    assert "a container needs `--privileged`" in problem(CPU)


def test_one_host_of_several(tpu, monkeypatch):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "10.0.0.1,10.0.0.2")
    assert "one host of 2 of a TPU slice" in problem(CPU)


def test_any_other_reason_is_jaxs_own(tpu):
    assert problem(CPU, failure="libtpu is too old").endswith(
        "JAX cannot use it: libtpu is too old."
    )


def test_a_gpu_without_support_is_told_what_to_install(machine):
    (machine / "dev" / "nvidia0").touch()
    assert 'pip install "jax[cuda13]"' in problem(CPU)
    assert problems(GPU) == []


def test_no_device_at_all_is_told_with_jaxs_reason(machine):
    assert problem(failure="no such platform") == (
        "JAX finds nothing to work on: no such platform."
    )


def test_versions_that_this_was_not_made_for(machine, monkeypatch):
    here = doctor.version
    monkeypatch.setattr(doctor, "version", lambda name: "0.4.1" if name == "jax" else here(name))
    assert problem(CPU).startswith("jax 0.4.1 is installed, and this was made for ")


def test_folders_that_cannot_be_written(machine, monkeypatch):
    (machine / "file").touch()
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(machine / "file"))
    assert "JAX_COMPILATION_CACHE_DIR names another" in problem(CPU)


def test_a_bucket_is_left_to_jax(machine, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "gs://bucket/cache")
    found = diagnose([CPU], hub=False)
    assert found.problems == [] and found.folders["compiled programs"].path == "gs://bucket/cache"
    assert found.folders["compiled programs"].free is None


def test_a_folder_below_one_that_cannot_be_looked_into_is_not_writable(machine, monkeypatch):
    def refuse(path):
        raise PermissionError(path)

    monkeypatch.setattr(doctor.shutil, "disk_usage", refuse)
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    assert "The folder of pictures cannot be written" in " ".join(problems(CPU))


def test_a_full_disk(machine, monkeypatch):
    monkeypatch.setattr(doctor, "LEAST_DISK", 10**18)
    assert "GB left for compiled programs and pictures and models from the hub" in problem(CPU)


def test_looking_makes_no_folder(machine):
    diagnose([CPU], hub=False)
    assert not [*(machine / "cache").iterdir(), *(machine / "data").iterdir()]


def test_the_hub_is_asked_unless_it_is_not_to_be(machine, monkeypatch):
    monkeypatch.setattr(doctor, "hub_answers", lambda: False)
    monkeypatch.setattr(doctor, "is_offline", lambda: False)
    assert diagnose([CPU]).hub is False and diagnose([CPU], hub=False).hub is None
    monkeypatch.setattr(doctor, "is_offline", lambda: True)
    assert diagnose([CPU]).hub is None


def test_a_hub_that_is_not_there_does_not_answer(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert doctor.hub_answers() is False


# --- the command --------------------------------------------------------------------------------


def run(capsys, *flags):
    code = cli.main(["doctor", "--no-hub", *flags])
    return code, capsys.readouterr().out


def test_the_command_says_what_is_here_and_what_is_wrong(machine, monkeypatch, capsys):
    monkeypatch.setattr(command, "_asked", lambda: ([TPU] * 8, ""))
    code, told = run(capsys)
    assert code == 0 and "8 × TPU v5 lite of 17.2 GB" in told
    assert told.endswith("\nNothing is wrong here.\n")
    code, told = run(capsys, "--memory", "0.001", "--dtype", "float32")
    assert code == 1 and told.splitlines()[-1].endswith(": --dtype bfloat16 halves that.")
    flags = "--memory", "0.001", "--devices"
    monkeypatch.setattr(command, "_asked", lambda: ([CPU], ""))
    for number, sentence in ((1, "at once, and"), (2, "at once on a replica by itself, and")):
        assert sentence in run(capsys, *flags, str(number))[1]


@pytest.mark.parametrize(
    ("device", "flags", "wrong"),
    [
        # In bfloat16 what draws takes 0.04 GB, and its text encoder need not be there then.
        (TPU, ("--dtype", "auto", "--memory", "0.05"), False),
        (TPU, ("--dtype", "float32", "--memory", "0.08"), True),
        (CPU, ("--devices", "1"), False),
        (CPU, ("--devices", "256"), True),  # of which each has all weights
    ],
)
def test_a_models_memory_is_that_which_the_page_would_take(
    machine, monkeypatch, capsys, device, flags, wrong
):
    monkeypatch.setattr(command, "_asked", lambda: ([device], ""))
    code, told = run(capsys, *flags)
    assert code == wrong, told


def test_json_has_the_same(machine, monkeypatch, capsys):
    monkeypatch.setattr(command, "_asked", lambda: ([CPU], ""))
    code, told = run(capsys, "--json")
    found = json.loads(told)
    assert code == 0 and found["problems"] == []
    assert found["devices"] == [{"kind": "cpu", "platform": "cpu", "memory": None}]
    assert found["folders"]["pictures"]["path"].startswith(str(machine))


def test_a_model_that_cannot_be_opened_is_a_problem(machine, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "_asked", lambda: ([CPU], ""))
    code, told = run(capsys, "--model", str(tmp_path))
    assert code == 1 and str(tmp_path) in told.splitlines()[-1]


@pytest.mark.slow("starts processes that ask JAX")
def test_jax_is_asked_in_a_process_that_is_ended_if_it_waits(monkeypatch):
    assert command._asked() == ([Device("cpu", "cpu")] * 8, "")  # as the tests have it
    monkeypatch.setattr(command, "ASK", "import time; time.sleep(60)")
    monkeypatch.setattr(command, "SECONDS", 0.1)
    assert command._asked() == ([], "it waited for 0.1 s")
    monkeypatch.setattr(command, "SECONDS", 60)
    monkeypatch.setattr(command, "ASK", "raise SystemExit('no chips')")
    assert command._asked() == ([], "no chips")


def test_a_diagnosis_needs_no_jax():
    program = (
        "import sys; from sd_tpu.doctor import diagnose; diagnose(None, hub=False); "
        "print({'jax', 'flax', 'gradio'} & {*sys.modules})"
    )
    assert told_by(program).stdout == "set()\n"
