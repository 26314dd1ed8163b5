"""A reviewer's questions about a run, answered from its own files.

The questions follow the subjects of NIST SP 800-226 (2025), from the parameters to the collection
of the data. A question that the files cannot answer is marked as open, for the owner of the run.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from corrnoise._rounding import rounded_up
from corrnoise.records import Run, Statement


@dataclass(frozen=True)
class Answer:
    """One question of a reviewer, with its answer.

    Attributes:
        subject: the subject in a few words.
        question: the full question.
        answer: the answer from the run's files, or what its owner must add.
        open: whether the owner must answer, at least in part, or something is wrong.
    """

    subject: str
    question: str
    answer: str
    open: bool = False


def checklist(run: Run) -> list[Answer]:
    """A reviewer's questions, answered from the plan, the statement and the settings of a run.

    >>> import corrnoise as cn
    >>> from corrnoise.records import Run
    >>> plan = cn.plan(num_examples=1000, batch_size=100, epochs=2, epsilon=4, delta=1e-6,
    ...                sampling="fixed", mechanisms="dp_sgd")
    >>> stated = Statement.of(plan, clip_norm=1.0, num_parameters=100)
    >>> answers = checklist(Run("mine", plan, stated, (), {}, {}, {}, 60.0))
    >>> answers[0].subject, answers[0].open
    ('Parameters', False)
    >>> print(answers[0].answer)
    ε = 4, δ = 1e-06; ε is exact. δ is below 1/1,000, one over the number of examples.
    """
    s, c = run.statement, run.plan.calibration
    ratio = s.delta * s.num_examples
    against = "below" if ratio < 1.0 else "NOT below"
    secret = "They must stay secret for ε to hold." if c.sampling.secret else "They may be public."
    accuracy = run.test_accuracy
    shown = "not measured" if accuracy is None else f"test accuracy {100.0 * accuracy:.1f} %"
    tail = ""
    if s.truncation is not None:
        tail = f"; the largest value of the normals adds at most {rounded_up(s.truncation, 2)} to δ"
    released = "the next checkpoint" if s.publishes == "checkpoints" else "its noisy gradient"
    stream = "the key decides all of it" if s.num_parameters else "it is NOT cryptographic"
    return [
        Answer(
            "Parameters",
            "What are ε and δ, and what kind of numbers are they?",
            f"ε = {rounded_up(s.epsilon)}, δ = {rounded_up(s.delta, 3)}; ε is {s.assurance}. δ is "
            f"{against} 1/{s.num_examples:,}, one over the number of examples.",
            open=ratio >= 1.0,
        ),
        Answer(
            "Unit of privacy",
            "Whose data does the guarantee protect?",
            f"One {s.unit}, which takes part {s.participation}. Somebody with several "
            "examples is protected less: with j of them ε is up to j times as large, and δ grows "
            "with it.",
            open=True,
        ),
        Answer(
            "Neighbours",
            "Which datasets count as neighbours?",
            f"They differ in {s.neighbours}.",
        ),
        Answer(
            "Trust model",
            "Who sees the raw data?",
            "The central model: whoever trains holds the data and the key, and is trusted with "
            "both. The guarantee is against those who see what is published.",
        ),
        Answer(
            "What is published",
            "Which outputs does the guarantee cover?",
            f"The noisy gradients of {s.steps_taken} of {s.num_steps} steps and all that follows "
            f"from them, such as weights; a step counts as released with {released}. Training "
            "losses and gradients without noise are not covered and must not be published.",
            open=True,
        ),
        Answer(
            "Sensitivity",
            "How is the influence of one unit bounded?",
            f"Every example's gradient is clipped to norm {s.clip_norm:g}; {_influence(s)}.",
        ),
        Answer(
            "Mechanism",
            "Which noise is added, and how much?",
            f"Gaussian noise, correlated over steps by {s.mechanism}; its standard deviation is "
            f"{rounded_up(s.noise_multiplier, 6)} times the clip norm before it is correlated.",
        ),
        Answer(
            "Sampling",
            "Does the guarantee rest on random batches?",
            f"Batches: {s.sampling}. {secret}",
        ),
        Answer(
            "Composition",
            "What else used the same data?",
            f"This run alone is priced, by: {s.accountant}. The whole run has ε = "
            f"{rounded_up(s.planned_epsilon)}; quote it if the stop depended on results. Other "
            "runs, statistics and the choice of hyperparameters add to it.",
            open=True,
        ),
        Answer(
            "Budget",
            "How is it known that no more was released?",
            f"The ledger of run {s.run_id or 'without a name'} records each step before its "
            "release; `corrnoise verify` compares it with the statement, with the key to the "
            "last bit.",
        ),
        Answer(
            "Randomness",
            "Where does the randomness come from?",
            f"{s.noise_source}: {stream}. Fingerprint of the key: {s.key_fingerprint or 'none'}.",
        ),
        Answer(
            "Floating point",
            "Is finite arithmetic covered?",
            "In the release: sums are exact, and what is released is the correctly rounded value "
            "of the continuous mechanism. In the accountant's own numbers as docs/guarantee.md "
            "says."
            if s.exact_release
            else f"No: arithmetic without rounding is assumed{tail}.",
        ),
        Answer(
            "Side channels",
            "Can timing, memory or errors reveal data?",
            "They are not covered. Sizes of random batches show in the time of a step.",
            open=True,
        ),
        Answer(
            "Security",
            "Who can read data, key, ledger and checkpoints?",
            "The key file has mode 0600. Access to the data and to the machine is up to its owner.",
            open=True,
        ),
        Answer(
            "Data collection",
            "How were the data collected and stored before training?",
            "The files of a run do not know. A guarantee of outputs undoes no leak of inputs.",
            open=True,
        ),
        Answer(
            "Utility",
            "What does the noise cost?",
            f"Expected error {c.error:.4g} per unit of clip norm; {shown}.",
        ),
        Answer(
            "Bias",
            "Does the noise hurt some groups more than others?",
            "Not measured. Clipping and noise weigh most on rare examples; compare accuracies by "
            "group.",
            open=True,
        ),
        Answer(
            "Implementation",
            "Why should the code do what the proof says?",
            "The proofs name their functions (docs/proofs), a second implementation checks plans "
            "(tools/verify_independently.py), and `corrnoise audit` tests the engine. Versions: "
            + ", ".join(f"{name} {value}" for name, value in s.versions.items())
            + ".",
        ),
    ]


def _influence(statement: Statement) -> str:
    """What bounds the influence of one example over all of its steps."""
    if not statement.by_sensitivity:
        return f"what it adds in all its steps is priced by: {statement.accountant}"
    kind = "exact" if statement.sensitivity_exact else "an upper bound"
    return f"the sensitivity of C is {rounded_up(statement.sensitivity, 6)}, {kind}"


def checklist_text(answers: list[Answer]) -> str:
    """The checklist as text; "[ ]" marks questions that are open, or where something is wrong."""
    parts: list[str] = []
    for each in answers:
        mark = "[ ]" if each.open else "[x]"
        body = textwrap.fill(each.answer, 96, initial_indent="      ", subsequent_indent="      ")
        parts.append(f"  {mark} {each.subject}: {each.question}\n{body}")
    return "\n".join(parts) + "\n"
