"""Plants every silent error of context parallelism that dyncp handles, and runs a test that fails.

    python -m benchmarks.planted                  all errors, one by one
    python -m benchmarks.planted sinks softcap    errors with these words in their names

Works on a copy of the sources. Prints for each error whether its test noticed it. The exit code is
1 if a test did not notice, or if a line to be changed no longer exists.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
ATTACH, FUNCTIONS, LAYERS, TRAINER = (
    f"src/dyncp/integrations/transformers/{name}.py"
    for name in ("attach", "functions", "layers", "trainer")
)
COMPARE, THRESHOLDS = (
    f"src/dyncp/integrations/transformers/{name}.py" for name in ("compare", "thresholds")
)
GRADIENTS, WATCHED, JUDGE = (
    f"src/dyncp/gradients/{name}.py" for name in ("sums", "watched", "judge")
)
SCALES = "tests/gradients/test_scales.py"
ONE, MANY, UNTESTED = (
    f"tests/integrations/test_{name}.py"
    for name in ("transformers", "transformers_ranks", "untested_models")
)
OWN = "tests/integrations/test_transformers_own_attention.py"


TARGETS, SEEN = "src/dyncp/samples/targets.py", "tests/samples/test_seen_targets.py"
CHECKS, CHECKED = "src/dyncp/samples/checks.py", "tests/samples/test_checks.py"
AGREEMENT, AGREE = "src/dyncp/dataloader/agreement.py", "tests/dataloader/test_agreement.py"
COMPILED, CACHES = "src/dyncp/compiled.py", "tests/test_compiled.py"
PART_CHECK, PARTS_RUN = "src/dyncp/plan/check.py", "tests/verify/test_parts_that_run.py"
MEMORY = "tests/planner/test_planning_memory.py"
CALIBRATES = "tests/cli/test_calibrate_command.py"
EMPTY_ROWS = "tests/kernels/test_empty_rows.py"


class Error(NamedTuple):
    name: str
    file: str
    before: str
    after: str
    tests: str
    chosen: str  # pytest -k


ERRORS = [
    Error("sinks are swallowed", FUNCTIONS, "sink=s_aux", "sink=None", ONE, "losses and gpt_oss"),
    Error(
        "a softcap in the config is not refused",
        LAYERS,
        'if "softcap" in option and',
        "if False and",
        ONE,
        "attach and softcap",
    ),
    Error(
        "a softcap that a layer gives is swallowed",
        FUNCTIONS,
        "if name not in HARMLESS and",
        "if name not in HARMLESS | {'softcap'} and",
        ONE,
        "unsupported_attention_arguments",
    ),
    Error(
        "scaling is swallowed", FUNCTIONS, "scale=scaling", "scale=None", ONE, "losses and granite"
    ),
    Error(
        "sliding layers see everything",
        LAYERS,
        "return mask if layer.size is None else",
        "return mask if True else",
        UNTESTED,
        "their_own_masks and gemma3",
    ),
    Error(
        "a plan without the layer's mask",
        FUNCTIONS,
        "if not compiling and layer.name not in",
        "if False and layer.name not in",
        ONE,
        "needs_their_masks",
    ),
    Error(
        "chunked layers see everything",
        LAYERS,
        'return LayerMask(f"{keyword}_{size}", keyword, size)',
        'return LayerMask(f"{keyword}_{size}", keyword, size if keyword == "window" else None)',
        UNTESTED,
        "Llama4Text",
    ),
    Error(
        "another window than the config's",
        FUNCTIONS,
        "if marker != _marker(layer.size) or",
        "if False and",
        ONE,
        "a_window_that_only",
    ),
    Error(
        "convolutions and linear attention run on parts",
        LAYERS,
        'if kind == "full_attention" or',
        'if kind in ("full_attention", "linear_attention") or',
        ONE,
        "attach and (convolutions or linear)",
    ),
    Error(
        "convolutions that the config does not tell of",
        LAYERS,
        "if isinstance(module, ORDERED) and",
        "if False and",
        UNTESTED,
        "convolutions_that",
    ),
    Error(
        "RoPE factors from the local largest position",
        FUNCTIONS,
        "    if largest:",
        "    if False:",
        MANY,
        "branches",
    ),
    Error(
        "RoPE by a module that the config does not tell of",
        LAYERS,
        "given += [getattr(module",
        "[getattr(module",
        UNTESTED,
        "rope_that_only",
    ),
    Error(
        "architectures with attention code of their own",
        LAYERS,
        "if not model._can_set_attn_implementation():",
        "if False:",
        ONE,
        "attach and (falcon or gpt-j or bloom)",
    ),
    Error(
        "a model that was never attached",
        "src/dyncp/executor/executor.py",
        "self._unused.check()",
        "pass",
        UNTESTED,
        "forgotten",
    ),
    Error(
        "another attention set after attach",
        ATTACH,
        "self._check_implementation()\n        step",
        "step",
        ONE,
        "another_attention",
    ),
    Error(
        "layers that do not call dyncp", ATTACH, "if missing:", "if False:", ONE, "does_not_call"
    ),
    Error(
        "the auxiliary loss of this rank's tokens",
        FUNCTIONS,
        "everywhere = torch.ops.dyncp.sum_of_ranks(step.number, choices.detach())",
        "everywhere = choices.detach()",
        MANY,
        "branches",
    ),
    Error(
        "the auxiliary loss twice",
        FUNCTIONS,
        "setattr(model, COEFFICIENT, 0.0)",
        "pass",
        ONE,
        "auxiliary",
    ),
    Error(
        "a stale step with as many rows",
        "src/dyncp/integrations/__init__.py",
        "elif not torch.equal(batch, own):",
        "elif False:",
        ONE,
        "of_another_batch",
    ),
    Error(
        "keywords that the model swallows: masks, caches, scores, head masks",
        ATTACH,
        "if name not in KEYWORDS and",
        "if False and",
        ONE,
        "calls_that",
    ),
    Error(
        "padded samples are trained on",
        "src/dyncp/samples/fields.py",
        'if sample.get("attention_mask") is None or',
        'if sample.get("attention_mask") is None or True or',
        "tests/dataloader/test_policies.py",
        "padding or padded",
    ),
    Error(
        "a batch without targets gives NaN",
        "src/dyncp/samples/targets.py",
        "torch.tensor(max(1, targets))",
        "torch.tensor(targets)",
        ONE,
        "without_targets",
    ),
    Error(
        "a loader made before init_process_group",
        "src/dyncp/dataloader/loader.py",
        "if self._is_alone and dist.is_initialized()",
        "if False and dist.is_initialized()",
        "tests/dataloader/test_loss.py",
        "before_the_process_group",
    ),
    Error(
        "an executor made before init_process_group",
        "src/dyncp/executor/executor.py",
        "if self._is_alone and dist.is_initialized()",
        "if False and dist.is_initialized()",
        "tests/dataloader/test_loss.py",
        "before_the_process_group",
    ),
    Error(
        "scores that the config asks for",
        LAYERS,
        '"output_attentions": "attention',
        '"output_nothing": "attention',
        UNTESTED,
        "scores_that_the_config",
    ),
    Error(
        "windows that count rows over branches",
        "src/dyncp/masks/mask.py",
        "if mask.length == window.length and _attends_other_runs",
        "if False and _attends_other_runs",
        "tests/masks/test_within.py",
        "window_of_rows",
    ),
    Error(
        "Trainer averages losses over ranks",
        TRAINER,
        "loss = times_ranks(outputs.loss)",
        "loss = outputs.loss",
        "tests/integrations/test_trainer.py",
        "under_ddp_and_fsdp",
    ),
    Error(
        "Trainer divides by the accumulated batches",
        TRAINER,
        "self.loss_is_scaled_for_ga = True",
        "self.loss_is_scaled_for_ga = False",
        "tests/integrations/test_trainer.py",
        "under_ddp_and_fsdp",
    ),
    Error(
        "attention dropout is left out",
        FUNCTIONS,
        "    if dropout:",
        "    if False:",
        ONE,
        "dropout",
    ),
    Error(
        "positions by the place on the rank",
        ATTACH,
        'if kwargs.get("position_ids") is None or',
        'if kwargs.get("position_ids") is None and False or',
        ONE,
        "calls_that and positions",
    ),
    Error(
        "labels are shifted inside a rank",
        ATTACH,
        'if kwargs.get("labels") is not None and kwargs.get("shift_labels") is None and',
        "if False and",
        ONE,
        "calls_that and labels",
    ),
    Error(
        "means over a rank's own targets",
        ATTACH,
        'if trained and kwargs.get("num_items_in_batch") is None:',
        "if False:",
        ONE,
        "calls_that and mean",
    ),
    Error(
        "a rank without tokens",
        ATTACH,
        "if self._needs_largest or rows == 0 else 0",
        "if self._needs_largest else 0",
        MANY,
        "branches",
    ),
    Error(
        "layers that look both ways",
        FUNCTIONS,
        'getattr(module, "is_causal", True)',
        "True",
        UNTESTED,
        "both_ways",
    ),
    Error(
        "classes of the user's pass as tested",
        LAYERS,
        'own = type(model).__module__.startswith("transformers.models.")',
        "own = True",
        UNTESTED,
        "mixes_rows",
    ),
    Error(
        "models with towers for images pass as tested",
        LAYERS,
        "return own and config is model.config and",
        "return own and",
        UNTESTED,
        "tower",
    ),
    Error(
        "untested models are not compared",
        COMPARE,
        "run.check(documents, expected)",
        "pass",
        UNTESTED,
        "mixes_rows",
    ),
    Error(
        "code that depends on numbers which no small batch reaches",
        COMPARE,
        "for threshold, results in thresholds:",
        "for threshold, results in ():",
        UNTESTED,
        "only_long",
    ),
    Error(
        "constants in code that no small batch reaches",
        THRESHOLDS,
        "if code is not function.__code__:",
        "if False:",
        UNTESTED,
        "only_long and ByConstant",
    ),
    Error(
        "rows are taken for positions beyond the comparison",
        COMPARE,
        "if counted.place:",
        "if False:",
        UNTESTED,
        "only_long or late_positions",
    ),
    Error(
        "rows in order hide who takes them for positions",
        COMPARE,
        "data = {name: value.to(model.device) for name, value in fields}",
        "data = {name: value.sort(-1).values if name == 'position_ids' else value for name, value "
        "in fields}",
        UNTESTED,
        "tested_models_give and llama",
    ),
    Error(
        "layers with other heads than the loader plans",
        LAYERS,
        "if isinstance(found, int) and found != wanted:",
        "if False:",
        UNTESTED,
        "heads_of_single_layers",
    ),
    Error(
        "layers whose heads only a call shows",
        COMPARE,
        "plan = _plan_out_of_order(batch, self.shape)",
        "plan = _plan_out_of_order(batch, AttentionShape.assumed())",
        UNTESTED,
        "heads_of_single_layers",
    ),
    Error(
        "calls of another dtype than the plan's need an option",
        "src/dyncp/executor/step.py",
        "if planned.exact and shape != replace(planned, dtype=shape.dtype):",
        "if planned.exact and shape != planned:",
        ONE,
        "autocast",
    ),
    Error(
        "calls with other heads than the plan's",
        "src/dyncp/executor/step.py",
        "if planned.exact and shape != replace(planned, dtype=shape.dtype):",
        "if False:",
        "tests/executor/test_errors.py",
        "do_not_fit",
    ),
    Error(
        "autocast rounds fp64",
        FUNCTIONS,
        "and value.dtype != torch.float64:",
        "and True:",
        ONE,
        "autocast_leaves",
    ),
    Error(
        "a forward without a step passes as generation",
        ATTACH,
        "if self._generates is None:\n            return False",
        "if self._generates is None:\n            return kwargs.get('dyncp_step') is None",
        OWN,
        "only_generate",
    ),
    Error(
        "gradients without a step within generation",
        ATTACH,
        'if kwargs.get("dyncp_step") is not None or torch.is_grad_enabled():',
        "if False:",
        OWN,
        "within_generation",
    ),
    Error(
        "training in another thread while the model generates",
        ATTACH,
        "if self._generates != threading.get_ident():",
        "if False:",
        OWN,
        "within_generation",
    ),
    Error(
        "after generation the model keeps its own attention",
        ATTACH,
        "self._generates = None\n            self._begin()",
        "self._generates = None",
        OWN,
        "generates_as_before or failed_generation",
    ),
    Error(
        "a detached model ignores steps",
        ATTACH,
        'if kwargs.get("dyncp_step") is not None:',
        "if False:",
        OWN,
        "twice",
    ),
    Error(
        "attach twice",
        ATTACH,
        "found = _attached_to(model)",
        "found = None",
        OWN,
        "twice",
    ),
    Error(
        "training in eval mode",
        FUNCTIONS,
        "warn_once(LEARNS_IN_EVAL)",
        "pass",
        OWN,
        "eval_mode",
    ),
    Error(
        "training in eval mode in some layers",
        ATTACH,
        "not all(x.training for x in self._learning)",
        "not self.model.training",
        OWN,
        "eval_mode",
    ),
    Error(
        "evaluation with dropout",
        FUNCTIONS,
        "warn_once(DROPS_IN_EVALUATION)",
        "pass",
        OWN,
        "dropout_in_evaluation",
    ),
    Error(
        "a loss function of the user's",
        LAYERS,
        'if hasattr(model, "_loss_function"):',
        "if False:",
        UNTESTED,
        "loss_of_the_users",
    ),
    Error(
        "layers dropped by chance",
        LAYERS,
        'if getattr(config, "layerdrop", 0):',
        "if False:",
        ONE,
        "attach and layerdrop",
    ),
    Error(
        "gradients that were summed are summed again",
        GRADIENTS,
        "if found and max(changes) <= 1:",
        "if False:",
        "tests/dataloader/test_loss.py",
        "summed_again",
    ),
    Error(
        "ranks that resume at different positions go on",
        AGREEMENT,
        "*_different_positions(records, ranks),",
        "",
        AGREE,
        "sentence or positions",
    ),
    Error(
        "ranks whose samples differ go on",
        AGREEMENT,
        "*_different_contents(records, ranks),",
        "",
        AGREE,
        "sentence",
    ),
    Error(
        "a step goes on without the targets of a rank that is closing",
        AGREEMENT,
        "if count >= LAST or self._leaving:",
        "if count >= LAST or self._closing:",
        AGREE,
        "closes",
    ),
    Error(
        "averages of DDP and FSDP are kept",
        GRADIENTS,
        "factor = 1.0 if sharded is None else sharded.divisor * covered / len(ranks)",
        "factor = 1.0",
        "tests/gradients/test_wrappers.py",
        "every_wrapper",
    ),
    Error(
        "gradients that were summed before are summed again",
        WATCHED,
        "if not found.is_sum:",
        "if False:",
        "tests/gradients/test_check.py",
        "double_sums",
    ),
    Error(
        "averages that nobody makes sums of",
        JUDGE,
        "for multiple in wrong:",
        "for multiple in ():",
        "tests/gradients/test_check.py",
        "averages",
    ),
    Error(
        "averages that clipping hides",
        JUDGE,
        "if last.is_clipped and",
        "if False and",
        SCALES,
        "clipped",
    ),
    Error(
        "losses that are divided by ranks",
        "src/dyncp/losses.py",
        'return watch_loss(losses.sum() / local_data["num_items_in_batch"])',
        'return losses.sum() / local_data["num_items_in_batch"]',
        SCALES,
        "multiplied",
    ),
    Error(
        "losses that ranks multiply differently",
        WATCHED,
        "raise factors_error(least, most)",
        "pass",
        SCALES,
        "multiplied",
    ),
    Error(
        "gradients that backward adds to sums",
        WATCHED,
        "self._is_late |= self._is_summed",
        "pass",
        SCALES,
        "other_batches",
    ),
    Error(
        "an optimiser step within the loader's",
        JUDGE,
        "if {batch.update for batch in own if batch.completes} != updates:",
        "if False:",
        SCALES,
        "other_batches",
    ),
    Error(
        "an optimiser of parameters that were replaced",
        "src/dyncp/gradients/check.py",
        "elif watched.is_idle and",
        "elif False and",
        SCALES,
        "replaced",
    ),
    Error(
        "noise whose size depends on a rank's rows",
        TRAINER,
        '"neftune_noise_alpha": (args.neftune_noise_alpha, parts),',
        "",
        "tests/integrations/test_trainer.py",
        "would_see",
    ),
    Error(
        "an optimiser step of several of the loader's",
        JUDGE,
        "if len(updates) > 1 and",
        "if False and",
        SCALES,
        "other_batches",
    ),
    Error(
        "sums that are missing",
        WATCHED,
        'self._compare("gradients", [_sums(_gradient(held)) for held in self._held])',
        "pass",
        "tests/gradients/test_check.py",
        "missing_sums",
    ),
    Error(
        "ranks begin with different weights",
        WATCHED,
        'self._compare("weights", [_sums(held.parameter) for held in self._held])',
        "pass",
        "tests/gradients/test_check.py",
        "initial_weights",
    ),
    Error(
        "Accelerate counts batches",
        "src/dyncp/integrations/accelerate.py",
        "if self._loader is None:\n            super()._do_sync()",
        "if True:\n            super()._do_sync()",
        "tests/integrations/test_accelerate.py",
        "under_ddp_and_fsdp",
    ),
    Error(
        "Trainer counts the batches of the first epoch only",
        TRAINER,
        'options["steps_in_epoch"] = loader.remaining',
        "pass",
        "tests/integrations/test_trainer.py",
        "incomplete",
    ),
    Error(
        "Trainer takes all epochs to be as long as the first one",
        TRAINER,
        "steps = self._count_steps(dataloader.loader, args.num_train_epochs)",
        "pass",
        "tests/integrations/test_trainer.py",
        "schedule",
    ),
    Error(
        "Trainer finds the epoch of a checkpoint by dividing steps",
        TRAINER,
        "return loader.epoch, 0",
        "return begun[0], 0",
        "tests/integrations/test_trainer.py",
        "all_epochs",
    ),
    Error(
        "rows that attend nothing are NaN with a sink of minus infinity",
        "src/dyncp/kernels/row_ops.py",
        "return torch.where(lse == -torch.inf, 0.0, torch.exp(lse - total))",
        "return torch.exp(lse - total)",
        EMPTY_ROWS,
        "attend_nothing and all",
    ),
    Error(
        "a sink that is NaN or too large for its dtype is taken",
        "src/dyncp/executor/attention.py",
        'if sink.device.type == "cpu":',
        "if False:",
        EMPTY_ROWS,
        "no_softmax_can_have",
    ),
    Error(
        "compiled code with a wrong checksum is run",
        COMPILED,
        "        _check(data)\n        return pickle.loads(data)",
        "        return pickle.loads(data)",
        CACHES,
        "pickle_ignores",
    ),
    Error(
        "compiled code of another function is run after a crash",
        COMPILED,
        "if found is not None and found[:2] == (self._source_stamp, key) else None",
        "if found is not None else None",
        CACHES,
        "another_function",
    ),
    Error(
        "a part that computes a division without tiles is taken",
        PART_CHECK,
        "_require(argument in divisions, COVERAGE, computes)",
        "pass",
        PARTS_RUN,
        "cannot_run",
    ),
    Error(
        "a part that waits for a phase before launching it is taken",
        PART_CHECK,
        "_require(argument in launched,",
        "_require(True,",
        PARTS_RUN,
        "cannot_run",
    ),
    Error(
        "a mask that needs more memory than there is is begun",
        "src/dyncp/masks/function.py",
        "    if length < LARGE:\n",
        "    if True:\n",
        MEMORY,
        "by_their_kind",
    ),
    Error(
        "a plan that needs more memory than there is is begun",
        "src/dyncp/planner/memory.py",
        "if most <= LARGE and",
        "if most <= 1e30 and",
        MEMORY,
        "a_plan_that_needs",
    ),
    Error(
        "a poor fit is written by calibrate",
        "src/dyncp/cli/calibrate.py",
        "if complaint and not args.accept_poor_fit:",
        "if False:",
        CALIBRATES,
        "stays_poor",
    ),
    Error(
        "a poor fit is not measured again",
        "src/dyncp/calibrate/calibration.py",
        "ATTEMPTS, BUSY = 3,",
        "ATTEMPTS, BUSY = 1,",
        CALIBRATES,
        "measured_again",
    ),
    Error(
        "a profile with a poor fit is used without a word",
        "src/dyncp/cost/profile.py",
        "if not profile.fit_error <= POOR_FIT:",
        "if False:",
        CALIBRATES,
        "told_by_every",
    ),
    Error(
        "a folder is taken for an output file",
        "src/dyncp/cli/arguments.py",
        "if path.is_dir():",
        "if False:",
        "tests/cli/test_mistakes.py",
        "outputs_are_checked",
    ),
    Error(
        "Trainer accumulates other batches than the loader",
        TRAINER,
        "if planned != steps:",
        "if False:",
        "tests/integrations/test_trainer.py",
        "count_differently",
    ),
    Error(
        "tokens train on targets that they see",
        TARGETS,
        "& (token != target)\n    if not seen.any():",
        "& False\n    if not seen.any():",
        SEEN,
        "see_their_target",
    ),
    Error(
        "tokens see targets through another token",
        "src/dyncp/masks/targets.py",
        "seen[rest] = _attends_a_reader(ranges, token[rest], target[rest])",
        "pass",
        SEEN,
        "loses_all",
    ),
    Error(
        "labels that tokens see",
        TARGETS,
        "if has_own and seen.any():",
        "if False:",
        SEEN,
        "refused",
    ),
    Error(
        "samples without any target left",
        TARGETS,
        "if seen.all() and len(seen):",
        "if False:",
        SEEN,
        "loses_all",
    ),
    Error(
        "labels equal to inputs in place",
        TARGETS,
        "torch.equal(ids, labels)",
        "False",
        SEEN,
        "masked",
    ),
    Error(
        "trees without their branches in shift_labels",
        "src/dyncp/samples/local_data.py",
        'del data["shift_labels"]',
        "pass",
        SEEN,
        "several_targets",
    ),
    Error(
        "advantages by row instead of by target",
        "src/dyncp/executor/row_moves.py",
        "return whole[_target_tokens(parts[0], data).to(whole.device)]",
        'return whole[data["target_rows"][0]]',
        "tests/executor/test_shard.py",
        "by_target",
    ),
    Error(
        "a collate that loses the fingerprint",
        "src/dyncp/dataloader/prepare.py",
        'data["batch_fingerprint"] = fingerprint_tensor(plan.fingerprint)',
        "pass",
        "tests/dataloader/test_sample_data.py",
        "identifies",
    ),
    Error(
        "a model that is called without the fingerprint",
        "src/dyncp/integrations/__init__.py",
        "    if batch is None:",
        "    if batch is None:\n        return\n    if False:",
        ONE,
        "calls_that and fingerprint",
    ),
    Error(
        "a collate that changes the number of targets",
        "src/dyncp/dataloader/prepare.py",
        "counted = data if",
        "counted = rows if",
        "tests/dataloader/test_sample_data.py",
        "counted_after",
    ),
    Error(
        "labels that are shifted",
        CHECKS,
        "_check_shift(ids, labels, number)",
        "pass",
        CHECKED,
        "name",
    ),
    Error("a mask of the loss is ignored", CHECKS, "if found and", "if False and", CHECKED, "name"),
    Error(
        "labels in some samples only",
        CHECKS,
        "elif self._first[1] != has:",
        "elif False:",
        CHECKED,
        "some_samples",
    ),
    Error(
        "ranks that read labels, and ranks that read none",
        "src/dyncp/samples/source.py",
        "if self._sampler is None and isinstance(sample, Mapping):",
        "if False:",
        CHECKED,
        "ranks_that",
    ),
    Error(
        "padding that nothing marks", CHECKS, "if RUN <= run", "if False and run", CHECKED, "marks"
    ),
    Error(
        "packed positions", CHECKS, "if len(starts) and not", "if False and not", CHECKED, "packed"
    ),
    Error(
        "positions beyond the model's",
        CHECKS,
        "if self._limits.learned:",
        "if False:",
        CHECKED,
        "does_not_have",
    ),
    Error(
        "a window wider than the model's",
        LAYERS,
        "if layer.size is not None and widest > layer.size:",
        "if False:",
        "tests/integrations/test_wide_windows.py",
        "wider",
    ),
    Error(
        "verdicts are deleted before all have read them",
        AGREEMENT,
        "if self._store.has(*map(self._left_key, there)):",
        "if len(there) < self._ranks.num_processes or not there:",
        AGREE,
        "counts_once",
    ),
]


def notices(error: Error, folder: Path) -> str:
    """The result of the test on a copy of the sources with the error in it."""
    path = folder / error.file
    text = path.read_text(encoding="utf-8")
    if error.before not in text:
        return "the line to be changed is GONE"
    path.write_text(text.replace(error.before, error.after), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider"]
    command += [error.tests, "-k", error.chosen]
    environment = os.environ | {"PYTHONPATH": "src:tests:."}
    try:
        found = subprocess.run(
            command,
            check=False,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
    finally:
        path.write_text(text, encoding="utf-8")
    if found.returncode == 1:
        return "noticed"
    return "NOT NOTICED" if found.returncode == 0 else f"NO TEST RAN: {found.stdout[-300:]}"


def main() -> int:
    words = sys.argv[1:]
    errors = [e for e in ERRORS if not words or any(word in e.name for word in words)]
    missed = 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name in ("src", "tests", "benchmarks", "examples", "docs"):
            shutil.copytree(ROOT / name, folder / name)
        shutil.copy(ROOT / "pyproject.toml", folder)
        for error in errors:
            started = perf_counter()
            found = notices(error, folder)
            missed += found != "noticed"
            print(f"{error.name:70} {found:12} {perf_counter() - started:4.0f} s", flush=True)
    print(f"{len(errors)} planted, {missed} not noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
