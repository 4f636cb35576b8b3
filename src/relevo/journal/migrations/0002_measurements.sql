-- What real loads and runs taught about memory.

-- Observations and failed allocations, oldest first. Bounded: the newest of each key, and in all (apply.py).
CREATE TABLE measurements (
  number INTEGER PRIMARY KEY,
  key TEXT NOT NULL,                     -- model, device and options, in one text
  engine TEXT NOT NULL,                  -- its kind and build
  driver TEXT NOT NULL,
  at REAL NOT NULL,
  value BLOB NOT NULL                    -- JSON of core.learned.Record
) STRICT;
CREATE INDEX measurements_of_key ON measurements (key, number);
