-- Every statement the journal runs while it works, by name. `-- name: NAME` begins one.

-- name: bump_commits
UPDATE identity SET commits = commits + 1 RETURNING commits;

-- name: accept_request
INSERT INTO requests (id, owner, model, kind, state, created, changed, idempotency_key, body_digest, kept, deadline_at, seed, prompt_tokens)
VALUES (:id, :owner, :model, :kind, 'accepted', :created, :created, :idempotency_key, :body_digest, :kept, :deadline_at, :seed, :prompt_tokens)
RETURNING number;

-- name: store_payload
INSERT INTO payloads (request, ask, prompt_tokens, weighed, standby, payload_path) VALUES (?, ?, ?, ?, ?, ?);

-- name: find_request
SELECT number, state FROM requests WHERE id = ?;

-- name: change_state
UPDATE requests SET state = :new, changed = :at, reason = :reason, kept_until = :kept_until
WHERE number = :number AND state = :old;

-- name: end_request
UPDATE requests SET state = :state, changed = :at, ended = :at, reason = :reason, kept_until = NULL, completion_tokens = :completion_tokens
WHERE number = :number AND ended IS NULL;

-- name: store_result
INSERT INTO results (request, result) VALUES (?, ?);

-- name: start_attempt
INSERT INTO attempts (request, attempt, route, device, replica_pid, started, cause) VALUES (?, ?, ?, ?, ?, ?, ?);

-- name: end_attempt
UPDATE attempts SET ended = :at, outcome = :outcome, code = :code, message = :message
WHERE request = :number AND attempt = :attempt AND ended IS NULL;

-- name: add_event
INSERT INTO events (request, seq, at, kind, payload)
VALUES (:number, 1 + coalesce((SELECT max(seq) FROM events WHERE request = :number), 0), :at, :kind, :payload);

-- name: save_checkpoint
INSERT INTO checkpoints (request, choice, tokens, text, delivered_bytes, finish, at) VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (request, choice) DO UPDATE SET tokens = excluded.tokens, text = excluded.text,
  delivered_bytes = excluded.delivered_bytes, finish = excluded.finish, at = excluded.at;

-- name: worker_started
INSERT INTO workers (pid, start_time, boot, model, route, device, at) VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET model = excluded.model, route = excluded.route, device = excluded.device, at = excluded.at;

-- name: worker_gone
DELETE FROM workers WHERE pid = ? AND start_time = ?;

-- name: forget_other_boots
DELETE FROM workers WHERE boot <> ?;

-- name: put_fact
INSERT INTO facts (key, value, at) VALUES (?, ?, ?)
ON CONFLICT (key) DO UPDATE SET value = excluded.value, at = excluded.at;

-- name: add_measurement
INSERT INTO measurements (key, engine, driver, at, value) VALUES (?, ?, ?, ?, ?);

-- name: forget_measurements_of_key
DELETE FROM measurements WHERE number IN (SELECT number FROM measurements WHERE key = ? ORDER BY number DESC LIMIT -1 OFFSET ?);

-- name: forget_measurements
DELETE FROM measurements WHERE number IN (SELECT number FROM measurements ORDER BY number DESC LIMIT -1 OFFSET ?);

-- name: add_gap
INSERT INTO gaps (at, commits_from, commits_to, numbers_from, numbers_to) VALUES (?, ?, ?, ?, ?);

-- name: skip_commits
UPDATE identity SET commits = max(commits, ?);

-- name: skip_numbers
UPDATE sqlite_sequence SET seq = max(seq, ?) WHERE name = 'requests';

-- name: begin_numbers
INSERT INTO sqlite_sequence (name, seq) SELECT 'requests', 0
WHERE NOT EXISTS (SELECT 1 FROM sqlite_sequence WHERE name = 'requests');

-- name: identity
SELECT journal, commits, coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'requests'), 0) FROM identity;

-- Reading. The columns of a summary, in the order of records.RequestSummary:

-- name: summary_of_id
SELECT number, id, owner, model, kind, state, created, changed, ended, reason, idempotency_key, body_digest, kept,
  deadline_at, kept_until, seed, prompt_tokens, completion_tokens, blanked
FROM requests WHERE id = ?;

-- name: summary_of_key
SELECT number, id, owner, model, kind, state, created, changed, ended, reason, idempotency_key, body_digest, kept,
  deadline_at, kept_until, seed, prompt_tokens, completion_tokens, blanked
FROM requests WHERE owner = ? AND idempotency_key = ?;

-- name: summaries_of_any_key
SELECT number, id, owner, model, kind, state, created, changed, ended, reason, idempotency_key, body_digest, kept,
  deadline_at, kept_until, seed, prompt_tokens, completion_tokens, blanked
FROM requests WHERE idempotency_key = :idempotency_key AND (:state IS NULL OR state = :state) ORDER BY number DESC LIMIT :limit;

-- name: summary_of_digest
SELECT number, id, owner, model, kind, state, created, changed, ended, reason, idempotency_key, body_digest, kept,
  deadline_at, kept_until, seed, prompt_tokens, completion_tokens, blanked
FROM requests WHERE owner = ? AND body_digest = ? AND created >= ? ORDER BY created DESC, number DESC LIMIT 1;

-- name: summaries
SELECT number, id, owner, model, kind, state, created, changed, ended, reason, idempotency_key, body_digest, kept,
  deadline_at, kept_until, seed, prompt_tokens, completion_tokens, blanked
FROM requests ORDER BY number DESC LIMIT :limit;

-- name: summaries_of_owner
SELECT number, id, owner, model, kind, state, created, changed, ended, reason, idempotency_key, body_digest, kept,
  deadline_at, kept_until, seed, prompt_tokens, completion_tokens, blanked
FROM requests WHERE owner = :owner ORDER BY number DESC LIMIT :limit;

-- name: summaries_in_state
SELECT number, id, owner, model, kind, state, created, changed, ended, reason, idempotency_key, body_digest, kept,
  deadline_at, kept_until, seed, prompt_tokens, completion_tokens, blanked
FROM requests WHERE state = :state AND (:owner IS NULL OR owner = :owner) ORDER BY number DESC LIMIT :limit;

-- name: summaries_open
SELECT number, id, owner, model, kind, state, created, changed, ended, reason, idempotency_key, body_digest, kept,
  deadline_at, kept_until, seed, prompt_tokens, completion_tokens, blanked
FROM requests WHERE state IN ('accepted', 'queued', 'running', 'resumable') ORDER BY number;

-- name: payload
SELECT ask, prompt_tokens, weighed, standby, payload_path FROM payloads WHERE request = ?;

-- name: result
SELECT result FROM results WHERE request = ?;

-- name: attempts
SELECT attempt, route, device, replica_pid, started, cause, ended, outcome, code, message
FROM attempts WHERE request = ? ORDER BY attempt;

-- name: checkpoints
SELECT choice, tokens, text, delivered_bytes, finish, at FROM checkpoints WHERE request = ? ORDER BY choice;

-- name: moves
SELECT at, old, new, reason FROM moves WHERE request = ? ORDER BY seq;

-- name: events
SELECT seq, at, kind, payload FROM events
WHERE request = (SELECT number FROM requests WHERE id = ?) AND seq > ? ORDER BY seq LIMIT ?;

-- name: workers
SELECT pid, start_time, model, route, device, at FROM workers ORDER BY at;

-- name: fact
SELECT value FROM facts WHERE key = ?;

-- name: facts
SELECT key, value FROM facts WHERE substr(key, 1, length(?1)) = ?1 ORDER BY key;

-- name: measurements
SELECT key, engine, driver, at, value FROM measurements
WHERE (:engine IS NULL OR engine = :engine) AND (:driver IS NULL OR driver = :driver) ORDER BY number;

-- name: measurements_of_key
SELECT key, engine, driver, at, value FROM measurements
WHERE key = :key AND (:engine IS NULL OR engine = :engine) AND (:driver IS NULL OR driver = :driver) ORDER BY number;

-- name: totals
SELECT state, requests FROM totals;

-- name: gaps
SELECT at, commits_from, commits_to, numbers_from, numbers_to FROM gaps ORDER BY at;

-- name: due
SELECT id FROM requests WHERE state = 'resumable' AND kept_until <= ? ORDER BY kept_until, number;

-- Retention.

-- name: to_blank_by_age
SELECT number FROM requests WHERE ended IS NOT NULL AND blanked IS NULL AND ended <= ? ORDER BY ended LIMIT ?;

-- name: to_blank_by_size
SELECT number FROM requests WHERE ended IS NOT NULL AND blanked IS NULL ORDER BY ended LIMIT ?;

-- name: to_delete
SELECT number FROM requests WHERE ended IS NOT NULL AND blanked IS NOT NULL AND ended <= ? ORDER BY ended LIMIT ?;

-- name: payload_path
SELECT payload_path FROM payloads WHERE request = ? AND payload_path IS NOT NULL;

-- name: payload_paths
SELECT payload_path FROM payloads WHERE payload_path IS NOT NULL;

-- name: delete_payload
DELETE FROM payloads WHERE request = ?;

-- name: delete_result
DELETE FROM results WHERE request = ?;

-- name: delete_checkpoints
DELETE FROM checkpoints WHERE request = ?;

-- name: blank_events
UPDATE events SET payload = NULL WHERE request = ? AND payload IS NOT NULL;

-- name: mark_blanked
UPDATE requests SET blanked = :at WHERE number = :number AND blanked IS NULL;

-- name: keys_to_free
SELECT number FROM requests WHERE idempotency_key IS NOT NULL AND ended IS NOT NULL AND ended <= ? ORDER BY ended LIMIT ?;

-- name: free_keys
UPDATE requests SET idempotency_key = NULL
WHERE number IN (SELECT number FROM requests WHERE idempotency_key IS NOT NULL AND ended IS NOT NULL AND ended <= ?
  ORDER BY ended LIMIT ?);

-- name: delete_request
DELETE FROM requests WHERE number = ?;
