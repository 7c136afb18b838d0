"""Faults in what a training run keeps, in the order of its windows, and in what a text is judged by."""

from scripts.mutants.mutant import Mutant, tests

SESSION, CHECKPOINT, LEARNER = "training/session.py", "training/checkpoint.py", "training/learner.py"
EVALUATION, LOG, ORDER, SOURCES = "training/evaluation.py", "training/log.py", "data/order.py", "data/sources.py"
STOPPED = tests("training/test_run.py", "test_a_stopped_run_ends_as_one_that_never_was[stops2]")
AGAIN = tests("training/test_run.py", "test_what_came_after_the_checkpoint_is_done_again_and_logged_once")

MUTANTS = (
    Mutant("dropout begins anew on resuming", SESSION, "        torch.set_rng_state(checkpoint.random)\n", "", STOPPED),
    Mutant("the moments begin anew on resuming", CHECKPOINT, "        learner.set_moments(moments)\n", "", STOPPED),
    Mutant(
        "the weights begin anew on resuming",
        CHECKPOINT,
        "        learner.model.load_state_dict(saved.state_dict())\n",
        "",
        STOPPED,
    ),
    Mutant(
        "a line's mean forgets what came before the stop",
        SESSION,
        "            self.counts = Counts.of(checkpoint.progress)\n",
        "            self.counts = Counts.of({**checkpoint.progress, 'loss': 0.0})\n",
        STOPPED,
    ),
    Mutant(
        "lines after the checkpoint stay", LOG, "            os.truncate(path, size)\n", "            pass\n", AGAIN
    ),
    Mutant(
        "the place in the order is rounded on resuming",
        SESSION,
        "        self.step = checkpoint.step\n",
        "        self.step = checkpoint.step // 5 * 5\n",
        STOPPED,
    ),
    Mutant(
        "a batch is summed, not averaged",
        LEARNER,
        "(loss / tokens).backward()",
        "loss.backward()",
        tests("training/test_learner.py", "test_updates_are_adamws_on_the_mean_loss_clipped"),
    ),
    Mutant(
        "embeddings decay",
        LEARNER,
        "decayed = [p for p in decayed if id(p) not in embeddings]",
        "others = [p for p in others if id(p) not in embeddings]",
        tests("training/test_learner.py", "test_norms_gates_biases_and_embeddings_do_not_decay"),
    ),
    Mutant(
        "the state is not carried",
        EVALUATION,
        "given = None if fresh else state",
        "given = None",
        tests("training/test_evaluation.py", "test_a_carried_state_gives_the_score_of_the_whole[7]"),
    ),
    Mutant(
        "a stretch's last token is not predicted",
        EVALUATION,
        "            held = held[len(part) - 1 :]\n",
        "            held = held[len(part) :]\n",
        tests("training/test_evaluation.py", "test_a_carried_state_gives_the_score_of_the_whole[7]"),
    ),
    Mutant(
        "an order may name a window twice",
        ORDER,
        "        found[outside] = _permuted(found[outside], half, keys)\n",
        "        found[outside] %= np.uint64(count)\n",
        tests("data/test_token_files.py", "test_an_order_names_everything_once"),
    ),
    Mutant(
        "a piece ends within blanks",
        SOURCES,
        'if text[place] in " \\n" and text[place - 1].isalnum():',
        'if text[place] in " \\n":',
        tests("data/test_tokenizers.py", "test_pieces_are_encoded_as_the_whole"),
    ),
)
