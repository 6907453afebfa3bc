"""The paper's run by path: what is missing is said, and the launch script's keys are held against the paper's."""

import json

from experiments.exp_7_13_simplevla import libero


def lay_out(root, **changed):
    """A program, a checkpoint and a LIBERO that have everything; `changed`: keys of the script with other values."""
    script = root / "program" / libero.SCRIPT
    script.parent.mkdir(parents=True)
    values = {key.replace(".", "_"): key for key in libero.PAPER}
    lines = [f"    {key}={changed.get(flat, libero.PAPER[key])} \\" for flat, key in values.items()]
    script.write_text("python -m verl.trainer.main_ppo \\\n    data.task_suite_name=$DATASET_NAME \\\n" + "\n".join(lines))
    (root / "program/verl/trainer").mkdir(parents=True)
    (root / "program/verl/trainer/main_ppo.py").touch()
    (root / "model").mkdir()
    (root / "model/config.json").write_text(json.dumps({"model_type": "openvla"}))
    (root / "model/model-1.safetensors").touch()
    for part in ("bddl_files/libero_10", "init_files/libero_10", "assets"):
        (root / "libero/libero/libero" / part).mkdir(parents=True)
    return [f"{key}={root / key}" for key in ("program", "model", "libero")]


def test_with_everything_in_place_the_line_is_printed(tmp_path, capsys):
    assert libero.main(lay_out(tmp_path)) == 0
    said = capsys.readouterr().out
    assert "bash examples/run_openvla_oft_rl_libero.sh" in said and "missing" not in said


def test_everything_that_is_missing_is_said_at_once(tmp_path, capsys):
    assert libero.main([]) == 1
    assert capsys.readouterr().out.count("is not given") == 3
    words = lay_out(tmp_path)
    (tmp_path / "model/model-1.safetensors").unlink()
    (tmp_path / "model/config.json").write_text(json.dumps({"model_type": "llama"}))
    assert libero.main([*words, "suite=libero_goal"]) == 1
    said = capsys.readouterr().out
    assert "model_type=llama" in said and "safetensors" in said and "bddl_files/libero_goal is not there" in said
    assert said.count("missing:") == 4


def test_a_key_that_is_not_the_papers_is_said(tmp_path, capsys):
    words = lay_out(tmp_path, data_n_samples=4, actor_rollout_ref_rollout_temperature="$HEAT")
    assert libero.main(words) == 1
    said = capsys.readouterr().out
    assert "has data.n_samples=4; the paper's value is 8" in said and "temperature=$HEAT" in said
    script = tmp_path / "program" / libero.SCRIPT
    script.write_text(script.read_text().replace("algorithm.kl_ctrl.kl_coef", "algorithm.kl_coef"))
    assert any(
        "no key algorithm.kl_ctrl.kl_coef" in line for line in libero.disagreements(libero.script_keys(script.read_text()))
    )


def test_a_word_that_is_not_understood_is_refused(capsys):
    assert libero.main(["modle=x"]) == 2 and libero.main(["suite=libero_11"]) == 2
    said = capsys.readouterr().err
    assert "model" in said and "libero_90" in said
