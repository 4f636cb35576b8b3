-- The whole schema, for reading. A new file is made by the migrations; a test checks that both end equal.
-- Times are seconds since the epoch (wall). Payloads are bytes (JSON unless said otherwise).

-- One row: who this journal is, and how far it has come.
CREATE TABLE identity (
  only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
  journal TEXT NOT NULL,                 -- random, so that a side record of another journal is recognised
  made REAL NOT NULL,
  commits INTEGER NOT NULL               -- rises by one with each commit that changed anything
) STRICT;

-- A request: what stays when its payload is blanked.
CREATE TABLE requests (
  number INTEGER PRIMARY KEY AUTOINCREMENT,  -- order of acceptance; never used again
  id TEXT NOT NULL UNIQUE,
  owner TEXT NOT NULL,
  model TEXT NOT NULL,
  kind TEXT NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('accepted', 'queued', 'running', 'resumable', 'completed', 'cancelled', 'failed')),
  created REAL NOT NULL,
  changed REAL NOT NULL,                 -- when the present state began
  ended REAL,
  reason TEXT,                           -- of the present state
  idempotency_key TEXT,                  -- freed (NULL) after the retention time
  body_digest TEXT NOT NULL,
  kept INTEGER NOT NULL CHECK (kept IN (0, 1)),
  deadline_at REAL,
  kept_until REAL,                       -- when a resumable request expires
  seed TEXT NOT NULL,                    -- decimal, 0 to 2^64-1: SQLite's integers are signed
  prompt_tokens INTEGER NOT NULL,
  completion_tokens INTEGER,
  blanked REAL,                          -- when ask, prompt, result, checkpoints and event payloads were removed
  CHECK ((state IN ('completed', 'cancelled', 'failed')) = (ended IS NOT NULL))
) STRICT;
-- One request for each key of an owner.
CREATE UNIQUE INDEX requests_by_key ON requests (owner, idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE INDEX requests_by_digest ON requests (owner, body_digest, created);
CREATE INDEX requests_of_owner ON requests (owner, number);
CREATE INDEX requests_in_state ON requests (state, number);
CREATE INDEX requests_to_blank ON requests (ended) WHERE ended IS NOT NULL AND blanked IS NULL;
CREATE INDEX requests_with_key ON requests (ended) WHERE ended IS NOT NULL AND idempotency_key IS NOT NULL;
CREATE INDEX requests_to_delete ON requests (ended) WHERE ended IS NOT NULL AND blanked IS NOT NULL;

-- What was asked. Apart from `requests`, so that a change of state does not write it again.
CREATE TABLE payloads (
  request INTEGER PRIMARY KEY REFERENCES requests (number) ON DELETE CASCADE,
  ask BLOB NOT NULL,
  prompt_tokens BLOB NOT NULL,           -- 4 bytes a token, little endian
  weighed BLOB NOT NULL,
  standby BLOB NOT NULL,
  payload_path TEXT                      -- of a large body, relative to the state folder
) STRICT;
CREATE INDEX payloads_with_file ON payloads (payload_path) WHERE payload_path IS NOT NULL;

-- What came of it.
CREATE TABLE results (
  request INTEGER PRIMARY KEY REFERENCES requests (number) ON DELETE CASCADE,
  result BLOB NOT NULL
) STRICT;

-- Every state a request was in, written by the triggers below and by nothing else.
CREATE TABLE moves (
  request INTEGER NOT NULL REFERENCES requests (number) ON DELETE CASCADE,
  seq INTEGER NOT NULL,
  at REAL NOT NULL,
  old TEXT,
  new TEXT NOT NULL,
  reason TEXT,
  PRIMARY KEY (request, seq)
) STRICT, WITHOUT ROWID;

-- How many requests are in each state, deleted ones included: accepted work is accounted for, always.
CREATE TABLE totals (
  state TEXT PRIMARY KEY,
  requests INTEGER NOT NULL CHECK (requests >= 0)
) STRICT, WITHOUT ROWID;
INSERT INTO totals VALUES ('accepted', 0), ('queued', 0), ('running', 0), ('resumable', 0),
  ('completed', 0), ('cancelled', 0), ('failed', 0);

CREATE TABLE attempts (
  request INTEGER NOT NULL REFERENCES requests (number) ON DELETE CASCADE,
  attempt INTEGER NOT NULL CHECK (attempt >= 1),
  route TEXT NOT NULL,
  device TEXT NOT NULL,
  replica_pid INTEGER,
  started REAL NOT NULL,
  cause TEXT,                            -- why this attempt was made
  ended REAL,
  outcome TEXT,
  code TEXT,
  message TEXT,
  PRIMARY KEY (request, attempt),
  CHECK ((ended IS NULL) = (outcome IS NULL))
) STRICT, WITHOUT ROWID;

CREATE TABLE events (
  request INTEGER NOT NULL REFERENCES requests (number) ON DELETE CASCADE,
  seq INTEGER NOT NULL CHECK (seq >= 1),
  at REAL NOT NULL,
  kind TEXT NOT NULL,
  payload BLOB,                          -- NULL: blanked
  PRIMARY KEY (request, seq)
) STRICT, WITHOUT ROWID;

-- The newest checkpoint of each choice.
CREATE TABLE checkpoints (
  request INTEGER NOT NULL REFERENCES requests (number) ON DELETE CASCADE,
  choice INTEGER NOT NULL CHECK (choice >= 0),
  tokens BLOB NOT NULL,                  -- all output tokens so far, 4 bytes each, little endian
  text TEXT NOT NULL,                    -- all released text so far
  delivered_bytes INTEGER NOT NULL CHECK (delivered_bytes >= 0),
  finish TEXT,
  at REAL NOT NULL,
  PRIMARY KEY (request, choice)
) STRICT;

-- Worker processes that may be alive. A pid alone can be another process after a while; its start time tells.
CREATE TABLE workers (
  pid INTEGER NOT NULL,
  start_time INTEGER NOT NULL,           -- clock ticks since boot, from /proc/PID/stat
  boot TEXT NOT NULL,                    -- of which boot
  model TEXT NOT NULL,
  route TEXT NOT NULL,
  device TEXT NOT NULL,
  at REAL NOT NULL,
  PRIMARY KEY (pid, start_time, boot)
) STRICT, WITHOUT ROWID;

-- Small things worth knowing again after a restart.
CREATE TABLE facts (
  key TEXT PRIMARY KEY,
  value BLOB NOT NULL,
  at REAL NOT NULL
) STRICT, WITHOUT ROWID;

-- What real loads and runs taught about memory: observations and failed allocations, oldest first.
-- Bounded: the newest of each key, and in all (apply.py).
CREATE TABLE measurements (
  number INTEGER PRIMARY KEY,
  key TEXT NOT NULL,                     -- model, device and options, in one text
  engine TEXT NOT NULL,                  -- its kind and build
  driver TEXT NOT NULL,
  at REAL NOT NULL,
  value BLOB NOT NULL                    -- JSON of core.learned.Record
) STRICT;
CREATE INDEX measurements_of_key ON measurements (key, number);

-- Announced losses: commits that were acknowledged and were not in the file at start.
CREATE TABLE gaps (
  at REAL NOT NULL,
  commits_from INTEGER NOT NULL,
  commits_to INTEGER NOT NULL,
  numbers_from INTEGER,
  numbers_to INTEGER
) STRICT;

CREATE TRIGGER request_accepted AFTER INSERT ON requests BEGIN
  INSERT INTO moves VALUES (new.number, 1, new.created, NULL, new.state, new.reason);
  UPDATE totals SET requests = requests + 1 WHERE state = new.state;
END;

CREATE TRIGGER request_moved AFTER UPDATE OF state ON requests WHEN old.state <> new.state BEGIN
  INSERT INTO moves
    SELECT new.number, 1 + max(seq), new.changed, old.state, new.state, new.reason FROM moves WHERE request = new.number;
  UPDATE totals SET requests = requests - 1 WHERE state = old.state;
  UPDATE totals SET requests = requests + 1 WHERE state = new.state;
END;

-- The last line of defence: what ended stays as it ended.
CREATE TRIGGER request_ended_once BEFORE UPDATE OF
  id, owner, model, kind, state, created, changed, ended, reason, body_digest, kept, seed, prompt_tokens, completion_tokens
ON requests WHEN old.ended IS NOT NULL BEGIN
  SELECT RAISE (ABORT, 'an ended request never changes');
END;

CREATE TRIGGER request_deleted BEFORE DELETE ON requests WHEN old.ended IS NULL BEGIN
  SELECT RAISE (ABORT, 'an open request is never deleted');
END;

CREATE TRIGGER payload_changed BEFORE UPDATE ON payloads BEGIN
  SELECT RAISE (ABORT, 'what was asked never changes');
END;

CREATE TRIGGER payload_deleted BEFORE DELETE ON payloads
WHEN (SELECT ended IS NULL FROM requests WHERE number = old.request) BEGIN
  SELECT RAISE (ABORT, 'the payload of an open request is never deleted');
END;

CREATE TRIGGER result_changed BEFORE UPDATE ON results BEGIN
  SELECT RAISE (ABORT, 'a result never changes');
END;

CREATE TRIGGER move_changed BEFORE UPDATE ON moves BEGIN
  SELECT RAISE (ABORT, 'a move never changes');
END;

CREATE TRIGGER event_changed BEFORE UPDATE ON events
WHEN new.payload IS NOT NULL OR new.request <> old.request OR new.seq <> old.seq OR new.at <> old.at OR new.kind <> old.kind BEGIN
  SELECT RAISE (ABORT, 'an event never changes');
END;

CREATE TRIGGER attempt_numbered BEFORE INSERT ON attempts
WHEN new.attempt <> 1 + coalesce((SELECT max(attempt) FROM attempts WHERE request = new.request), 0) BEGIN
  SELECT RAISE (ABORT, 'attempts are numbered without gaps');
END;

CREATE TRIGGER attempt_ended_once BEFORE UPDATE ON attempts WHEN old.ended IS NOT NULL BEGIN
  SELECT RAISE (ABORT, 'an attempt ends once');
END;
