"""The tables of `journal.sqlite`, format 3 (`PRAGMA user_version`).

Every row carries the `incarnation` it was written in: 0 for the first life of a run, one more for each resume. An
incarnation is whole by itself: what a resumed run reuses of an earlier one it records again, in the step that admits the
prompt. So of all incarnations that have a prompt, the newest says how it stands. Times are unix seconds, and within a life in
the order in which things happened, also where the machine's clock went back.

A life begins at the version `begun_step`, which is what the checkpoint held that it was resumed from: what earlier lives
trained from there on is lost, and trained again. One step of the conductor is never written half.

| table           | a row is                                                                     | written on        |
| --------------- | ---------------------------------------------------------------------------- | ----------------- |
| `incarnations`  | one life of the run: its config, where it began, and how it ended            | opening, `Finish` |
| `prompts`       | a prompt admitted; `group_id` is its ordinal in the stream                   | `Admit`           |
| `partials`      | tokens of a member that has not finished, after its first `position` ones    | `Wrote`           |
| `completions`   | a finished member: its tokens, logprobs and the versions that wrote them     | `Score`           |
| `verdicts`      | a member's reward; `value` NULL is no verdict, which is not zero             | `Scored`          |
| `drops`         | a prompt (`member` NULL) or one member that left untrained, with the reason  | `Drop`            |
| `batches`       | a batch: trains version `step` into `step + 1`; `trained_at` when it has     | `Train`           |
| `batch_groups`  | the groups of a batch, in order                                              | `Train`           |
| `versions`      | a weight version published                                                   | `Published`       |
| `evaluations`   | mean reward on held-out prompts under one version                            | evaluations       |
| `checkpoints`   | a checkpoint that is complete on disk; a folder without a row is garbage     | checkpoints       |
| `engine_events` | an engine came up, went down, left, was lost, loaded, or failed a request    | engine events     |

The rows of `partials` of one member follow each other without a gap. They go away in the transaction that writes its
completion, and when it is dropped, unless that is because the run was stopped.

Blobs are little-endian: `token_ids` int32 `[tokens]`, `logprobs` float32 `[tokens]`. `columns`, `parts`, `counters` and
`config` are JSON objects, `messages` is a JSON list of them. `spans` is a JSON list of [version step, version incarnation,
oldest key-value step, oldest key-value incarnation, tokens], which together cover the tokens of the row in order. `turns` is
empty but for an episode: a JSON list of [kept, ids, tokens, finish] for each turn, whose prompt is the first `kept` tokens of
the prompt and answer before it and then `ids`, and whose answer is the next `tokens` of the completion's. `checksum` tells a
row from one that the disk has changed (`journal.codec.checksum`, of the columns in `journal.decode`).

Views for people, of each incarnation by itself: `rollouts` (one row a member: prompt, completion, reward, the step that
trained it or why none did) and `groups` (one row a prompt: rewards summed up, and its fate). Over all lives together:
`lineage` (each prompt once, as the newest incarnation that has it says; `trained_step` is NULL where a later life began at
or before that step, and so lost it), `lineage_rollouts` (their members) and `lineage_batches` (what the weights that there
are were trained on). For example the prompts the policy never solves:

    SELECT prompt, members, best_reward FROM lineage WHERE best_reward = 0 ORDER BY group_id;
"""

from __future__ import annotations

from typing import Final

APPLICATION_ID: Final = 0x726C7964  # "rlyd": tells a journal from any other SQLite file
FORMAT: Final = 3

# What survives of several lives. A life says how the prompts stand that no later one admitted; a step is lost where a later one
# began at or before it.
OWN: Final = "SELECT group_id, max(incarnation) AS incarnation FROM prompts GROUP BY group_id"
LOST: Final = "EXISTS (SELECT 1 FROM incarnations i WHERE i.incarnation > {life} AND i.begun_step <= {step})"

_TABLES: Final = f"""
CREATE TABLE incarnations (
    incarnation INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    rollyard TEXT NOT NULL,
    seed INTEGER NOT NULL,
    group_size INTEGER NOT NULL,
    config TEXT NOT NULL,
    started_at REAL NOT NULL,
    begun_step INTEGER,
    begun_incarnation INTEGER,
    ended_at REAL,
    cause TEXT,
    failed INTEGER
) STRICT;

CREATE TABLE prompts (
    incarnation INTEGER NOT NULL REFERENCES incarnations,
    group_id INTEGER NOT NULL,
    row INTEGER NOT NULL,
    text TEXT NOT NULL,
    token_ids BLOB NOT NULL,
    columns TEXT NOT NULL,
    messages TEXT NOT NULL,
    admitted_at REAL NOT NULL,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (incarnation, group_id)
) STRICT;

CREATE TABLE partials (
    incarnation INTEGER NOT NULL,
    group_id INTEGER NOT NULL,
    member INTEGER NOT NULL,
    position INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    token_ids BLOB NOT NULL,
    logprobs BLOB NOT NULL,
    spans TEXT NOT NULL,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (incarnation, group_id, member, position),
    FOREIGN KEY (incarnation, group_id) REFERENCES prompts
) STRICT;

CREATE TABLE completions (
    incarnation INTEGER NOT NULL,
    group_id INTEGER NOT NULL,
    member INTEGER NOT NULL,
    finish TEXT NOT NULL,
    tokens INTEGER NOT NULL,
    token_ids BLOB NOT NULL,
    logprobs BLOB NOT NULL,
    spans TEXT NOT NULL,
    turns TEXT NOT NULL,
    oldest_version INTEGER,
    text TEXT NOT NULL,
    finished_at REAL NOT NULL,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (incarnation, group_id, member),
    FOREIGN KEY (incarnation, group_id) REFERENCES prompts
) STRICT;

CREATE TABLE verdicts (
    incarnation INTEGER NOT NULL,
    group_id INTEGER NOT NULL,
    member INTEGER NOT NULL,
    value REAL,
    parts TEXT NOT NULL,
    problem TEXT NOT NULL,
    judged_at REAL NOT NULL,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (incarnation, group_id, member),
    FOREIGN KEY (incarnation, group_id, member) REFERENCES completions
) STRICT, WITHOUT ROWID;

CREATE TABLE drops (
    incarnation INTEGER NOT NULL,
    group_id INTEGER NOT NULL,
    member INTEGER,
    reason TEXT NOT NULL,
    cause TEXT NOT NULL,
    dropped_at REAL NOT NULL,
    FOREIGN KEY (incarnation, group_id) REFERENCES prompts
) STRICT;
CREATE UNIQUE INDEX one_drop ON drops (incarnation, group_id, ifnull(member, -1));

CREATE TABLE batches (
    incarnation INTEGER NOT NULL REFERENCES incarnations,
    step INTEGER NOT NULL,
    taken_at REAL NOT NULL,
    trained_at REAL,
    PRIMARY KEY (incarnation, step)
) STRICT;

CREATE TABLE batch_groups (
    incarnation INTEGER NOT NULL,
    step INTEGER NOT NULL,
    position INTEGER NOT NULL,
    group_id INTEGER NOT NULL,
    PRIMARY KEY (incarnation, step, position),
    UNIQUE (incarnation, group_id),
    FOREIGN KEY (incarnation, step) REFERENCES batches,
    FOREIGN KEY (incarnation, group_id) REFERENCES prompts
) STRICT;

CREATE TABLE versions (
    incarnation INTEGER NOT NULL REFERENCES incarnations,
    version_step INTEGER NOT NULL,
    version_incarnation INTEGER NOT NULL,
    published_at REAL NOT NULL
) STRICT;

CREATE TABLE evaluations (
    incarnation INTEGER NOT NULL REFERENCES incarnations,
    version_step INTEGER NOT NULL,
    version_incarnation INTEGER NOT NULL,
    mean_reward REAL,
    samples INTEGER NOT NULL,
    unscored INTEGER NOT NULL,
    evaluated_at REAL NOT NULL
) STRICT;

CREATE TABLE checkpoints (
    incarnation INTEGER NOT NULL REFERENCES incarnations,
    version_step INTEGER NOT NULL,
    version_incarnation INTEGER NOT NULL,
    folder TEXT NOT NULL,
    prompt_cursor INTEGER NOT NULL,
    counters TEXT NOT NULL,
    committed_at REAL NOT NULL
) STRICT;

CREATE TABLE engine_events (
    incarnation INTEGER NOT NULL REFERENCES incarnations,
    engine TEXT NOT NULL,
    event TEXT NOT NULL,
    version_step INTEGER,
    version_incarnation INTEGER,
    text TEXT NOT NULL,
    happened_at REAL NOT NULL
) STRICT;

CREATE VIEW rollouts AS
SELECT c.incarnation, c.group_id, c.member, p.text AS prompt, c.text AS completion, v.value AS reward,
       CASE WHEN b.trained_at IS NOT NULL AND v.value IS NOT NULL AND dm.reason IS NULL THEN b.step END AS trained_step,
       coalesce(dm.reason, dg.reason) AS dropped, coalesce(dm.cause, dg.cause) AS drop_cause,
       c.finish, c.tokens, c.oldest_version, v.problem, c.finished_at
FROM completions c
JOIN prompts p USING (incarnation, group_id)
LEFT JOIN verdicts v USING (incarnation, group_id, member)
LEFT JOIN batch_groups bg USING (incarnation, group_id)
LEFT JOIN batches b ON b.incarnation = bg.incarnation AND b.step = bg.step
LEFT JOIN drops dm ON dm.incarnation = c.incarnation AND dm.group_id = c.group_id AND ifnull(dm.member, -1) = c.member
LEFT JOIN drops dg ON dg.incarnation = c.incarnation AND dg.group_id = c.group_id AND ifnull(dg.member, -1) = -1;

CREATE VIEW groups AS
SELECT p.incarnation, p.group_id, p.row, p.text AS prompt, p.columns,
       count(c.member) AS members, count(v.value) AS judged,
       avg(v.value) AS mean_reward, min(v.value) AS worst_reward, max(v.value) AS best_reward, sum(c.tokens) AS tokens,
       CASE WHEN b.trained_at IS NOT NULL THEN b.step END AS trained_step, d.reason AS dropped, d.cause AS drop_cause
FROM prompts p
LEFT JOIN completions c USING (incarnation, group_id)
LEFT JOIN verdicts v USING (incarnation, group_id, member)
LEFT JOIN batch_groups bg ON bg.incarnation = p.incarnation AND bg.group_id = p.group_id
LEFT JOIN batches b ON b.incarnation = bg.incarnation AND b.step = bg.step
LEFT JOIN drops d ON d.incarnation = p.incarnation AND d.group_id = p.group_id AND ifnull(d.member, -1) = -1
GROUP BY p.incarnation, p.group_id;

CREATE VIEW lineage AS
SELECT g.group_id, g.incarnation, g.row, g.prompt, g.columns, g.members, g.judged,
       g.mean_reward, g.worst_reward, g.best_reward, g.tokens,
       CASE WHEN NOT {LOST.format(life="g.incarnation", step="g.trained_step")} THEN g.trained_step END AS trained_step,
       g.dropped, g.drop_cause
FROM groups g JOIN ({OWN}) USING (incarnation, group_id);

CREATE VIEW lineage_rollouts AS
SELECT l.group_id, r.member, r.incarnation, r.prompt, r.completion, r.reward,
       CASE WHEN l.trained_step IS NOT NULL THEN r.trained_step END AS trained_step,
       r.dropped, r.drop_cause, r.finish, r.tokens, r.oldest_version, r.problem, r.finished_at
FROM lineage l JOIN rollouts r USING (incarnation, group_id);

CREATE VIEW lineage_batches AS
SELECT b.step, b.incarnation, b.taken_at, b.trained_at FROM batches b
WHERE b.trained_at IS NOT NULL AND NOT {LOST.format(life="b.incarnation", step="b.step")};
"""

TABLES: Final = tuple(filter(str.strip, _TABLES.split(";")))  # a statement each

# Rows are written in this order: a row comes after those it refers to.
WRITES: Final = {
    "beginnings": "UPDATE incarnations SET begun_step = ?, begun_incarnation = ? WHERE incarnation = ?",
    "prompts": "INSERT INTO prompts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "completions": "INSERT INTO completions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "verdicts": "INSERT INTO verdicts VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
    "drops": "INSERT INTO drops VALUES (?, ?, ?, ?, ?, ?)",
    "batches": "INSERT INTO batches VALUES (?, ?, ?, NULL)",
    "batch_groups": "INSERT INTO batch_groups VALUES (?, ?, ?, ?)",
    "batches_trained": "UPDATE batches SET trained_at = ? WHERE incarnation = ? AND step = ?",
    "versions": "INSERT INTO versions VALUES (?, ?, ?, ?)",
    "evaluations": "INSERT INTO evaluations VALUES (?, ?, ?, ?, ?, ?, ?)",
    "checkpoints": "INSERT INTO checkpoints VALUES (?, ?, ?, ?, ?, ?, ?)",
    "engine_events": "INSERT INTO engine_events VALUES (?, ?, ?, ?, ?, ?, ?)",
    "endings": "UPDATE incarnations SET ended_at = ?, cause = ?, failed = ? WHERE incarnation = ?",
}

FORGET_PARTIAL: Final = "DELETE FROM partials WHERE incarnation = ? AND group_id = ? AND member = ?"
WRITE_PARTIAL: Final = "INSERT INTO partials VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
