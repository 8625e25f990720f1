"""The schema of the store: one migration for each change. A released migration is never edited."""

from __future__ import annotations

MIGRATIONS = (
    """
    CREATE TABLE sandboxes (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        template TEXT NOT NULL,
        state TEXT NOT NULL,
        instance TEXT NOT NULL,
        created_at REAL NOT NULL,
        deadline_at REAL,
        ended_at REAL,
        end_reason TEXT,
        metadata TEXT NOT NULL,
        limits TEXT NOT NULL
    ) WITHOUT ROWID;
    CREATE INDEX sandboxes_by_owner ON sandboxes (owner, created_at);
    CREATE INDEX sandboxes_running ON sandboxes (instance) WHERE state = 'running';
    CREATE INDEX sandboxes_ended ON sandboxes (ended_at) WHERE ended_at IS NOT NULL;
    """,
    """
    CREATE TABLE keys (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        role TEXT NOT NULL,
        name TEXT NOT NULL,
        hash TEXT NOT NULL UNIQUE,
        created_at REAL NOT NULL,
        revoked_at REAL,
        last_used_at REAL
    ) WITHOUT ROWID;
    """,
    """
    CREATE TABLE files (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        filename TEXT NOT NULL,
        purpose TEXT NOT NULL,
        bytes INTEGER NOT NULL,
        created_at REAL NOT NULL,
        expires_at REAL
    ) WITHOUT ROWID;
    CREATE INDEX files_by_owner ON files (owner, created_at);
    CREATE TABLE container_files (
        id TEXT PRIMARY KEY,
        sandbox TEXT NOT NULL,
        owner TEXT NOT NULL,
        path TEXT NOT NULL,
        source TEXT NOT NULL,
        bytes INTEGER NOT NULL,
        created_at REAL NOT NULL,
        modified_at REAL NOT NULL,
        kept INTEGER NOT NULL,
        origin TEXT
    ) WITHOUT ROWID;
    CREATE UNIQUE INDEX container_files_by_path ON container_files (sandbox, path);
    CREATE INDEX container_files_by_age ON container_files (created_at);
    CREATE INDEX container_files_by_owner ON container_files (owner) WHERE kept;
    CREATE TABLE responses (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        created_at REAL NOT NULL,
        status TEXT NOT NULL,
        previous TEXT,
        container TEXT,
        instance TEXT,
        include TEXT NOT NULL,
        bytes INTEGER NOT NULL,
        event_bytes INTEGER NOT NULL DEFAULT 0,
        body TEXT NOT NULL,
        input TEXT NOT NULL,
        transcript TEXT NOT NULL
    );
    CREATE INDEX responses_by_age ON responses (created_at);
    CREATE INDEX responses_by_owner ON responses (owner, created_at, bytes);
    CREATE INDEX responses_running ON responses (instance) WHERE instance IS NOT NULL;
    CREATE TABLE response_events (
        response TEXT NOT NULL,
        number INTEGER NOT NULL,
        body TEXT NOT NULL,
        PRIMARY KEY (response, number)
    );
    CREATE TABLE response_items (
        owner TEXT NOT NULL,
        id TEXT NOT NULL,
        response TEXT NOT NULL,
        PRIMARY KEY (owner, id)
    ) WITHOUT ROWID;
    CREATE INDEX response_items_by_response ON response_items (response);
    CREATE TABLE conversations (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        created_at REAL NOT NULL,
        used_at REAL NOT NULL,
        container TEXT,
        items INTEGER NOT NULL,
        bytes INTEGER NOT NULL,
        metadata TEXT NOT NULL
    ) WITHOUT ROWID;
    CREATE INDEX conversations_by_owner ON conversations (owner, bytes);
    CREATE TABLE conversation_items (
        conversation TEXT NOT NULL,
        position INTEGER NOT NULL,
        id TEXT NOT NULL,
        minted INTEGER NOT NULL,
        bytes INTEGER NOT NULL,
        body TEXT NOT NULL,
        PRIMARY KEY (conversation, position)
    );
    CREATE UNIQUE INDEX conversation_items_by_id ON conversation_items (id, conversation);
    CREATE INDEX conversations_by_use ON conversations (used_at);
    CREATE TABLE chat_calls (
        owner TEXT NOT NULL,
        call TEXT NOT NULL,
        created_at REAL NOT NULL,
        transcript BLOB NOT NULL,
        PRIMARY KEY (owner, call)
    ) WITHOUT ROWID;
    CREATE TABLE steps (
        id TEXT PRIMARY KEY,
        request TEXT NOT NULL,
        owner TEXT NOT NULL,
        kind TEXT NOT NULL,
        parent TEXT,
        started_at REAL NOT NULL,
        seconds REAL NOT NULL,
        outcome TEXT NOT NULL,
        fields TEXT NOT NULL,
        captured TEXT NOT NULL
    ) WITHOUT ROWID;
    CREATE INDEX steps_by_request ON steps (request);
    CREATE INDEX steps_by_age ON steps (started_at);
    CREATE INDEX steps_of_requests ON steps (started_at, id) WHERE kind = 'request';
    """,
    """
    CREATE TABLE code_files (
        id TEXT PRIMARY KEY,
        session TEXT NOT NULL,
        owner TEXT NOT NULL,
        tenant TEXT NOT NULL,
        user TEXT NOT NULL,
        space TEXT NOT NULL,
        name TEXT NOT NULL,
        bytes INTEGER NOT NULL,
        content_type TEXT NOT NULL,
        read_only INTEGER NOT NULL,
        sha256 TEXT NOT NULL,
        created_at REAL NOT NULL,
        used_at REAL NOT NULL
    ) WITHOUT ROWID;
    CREATE INDEX code_files_by_session ON code_files (session);
    CREATE INDEX code_files_by_owner ON code_files (owner, tenant, user, bytes);
    CREATE INDEX code_files_by_use ON code_files (used_at);
    CREATE TABLE code_sessions (
        key TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        used_at REAL NOT NULL
    ) WITHOUT ROWID;
    CREATE INDEX code_sessions_by_use ON code_sessions (used_at);
    CREATE TABLE code_workspaces (
        key TEXT NOT NULL,
        path TEXT NOT NULL,
        session TEXT NOT NULL,
        file TEXT NOT NULL,
        PRIMARY KEY (key, path)
    ) WITHOUT ROWID;
    CREATE INDEX code_workspaces_by_file ON code_workspaces (file);
    """,
    """
    CREATE TABLE code_room (
        owner TEXT NOT NULL,
        tenant TEXT NOT NULL,
        user TEXT NOT NULL,
        files INTEGER NOT NULL,
        bytes INTEGER NOT NULL,
        PRIMARY KEY (owner, tenant, user)
    ) WITHOUT ROWID;
    INSERT INTO code_room SELECT owner, tenant, user, COUNT(*), SUM(bytes) FROM code_files GROUP BY 1, 2, 3;
    DROP INDEX code_files_by_owner;
    """,
    """
    CREATE INDEX code_sessions_by_owner ON code_sessions (owner, used_at);
    """,
    """
    ALTER TABLE sandboxes ADD COLUMN on_deadline TEXT NOT NULL DEFAULT 'kill';
    ALTER TABLE sandboxes ADD COLUMN pause_memory TEXT NOT NULL DEFAULT 'true';
    ALTER TABLE sandboxes ADD COLUMN auto_resume TEXT NOT NULL DEFAULT 'false';
    ALTER TABLE sandboxes ADD COLUMN notes TEXT NOT NULL DEFAULT '{}';
    ALTER TABLE sandboxes ADD COLUMN paused_at REAL;
    ALTER TABLE sandboxes ADD COLUMN resumed_at REAL;
    ALTER TABLE sandboxes ADD COLUMN revival TEXT NOT NULL DEFAULT 'null';
    CREATE INDEX sandboxes_paused ON sandboxes (created_at) WHERE state = 'paused';
    CREATE TABLE snapshots (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        name TEXT,
        image TEXT NOT NULL,
        created_at REAL NOT NULL,
        body TEXT NOT NULL
    ) WITHOUT ROWID;
    CREATE INDEX snapshots_by_owner ON snapshots (owner, created_at);
    CREATE INDEX snapshots_by_name ON snapshots (owner, name) WHERE name IS NOT NULL;
    """,
    """
    CREATE TABLE runs (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        sandbox TEXT NOT NULL,
        context TEXT NOT NULL,
        instance TEXT,
        created_at REAL NOT NULL,
        ended_at REAL,
        outcome TEXT,
        reason TEXT,
        events INTEGER NOT NULL,
        bytes INTEGER NOT NULL,
        dropped TEXT NOT NULL
    ) WITHOUT ROWID;
    CREATE INDEX runs_by_owner ON runs (owner, created_at, bytes);
    CREATE INDEX runs_by_end ON runs (ended_at) WHERE ended_at IS NOT NULL;
    CREATE TABLE run_events (
        run TEXT NOT NULL,
        first INTEGER NOT NULL,
        last INTEGER NOT NULL,
        sizes TEXT NOT NULL,
        bytes INTEGER NOT NULL,
        body BLOB NOT NULL,
        PRIMARY KEY (run, first)
    );
    """,
    """
    CREATE TABLE built_templates (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        name TEXT NOT NULL,
        created_at REAL NOT NULL
    ) WITHOUT ROWID;
    CREATE UNIQUE INDEX built_templates_by_name ON built_templates (owner, name);
    CREATE TABLE template_builds (
        id TEXT PRIMARY KEY,
        template TEXT NOT NULL,
        owner TEXT NOT NULL,
        state TEXT NOT NULL,
        instance TEXT,
        snapshot TEXT,
        recipe TEXT,
        created_at REAL NOT NULL,
        body TEXT NOT NULL
    ) WITHOUT ROWID;
    CREATE INDEX template_builds_by_template ON template_builds (template, created_at);
    CREATE INDEX template_builds_by_recipe ON template_builds (owner, recipe) WHERE snapshot IS NOT NULL;
    CREATE INDEX template_builds_by_snapshot ON template_builds (snapshot) WHERE snapshot IS NOT NULL;
    CREATE TABLE template_tags (
        template TEXT NOT NULL,
        tag TEXT NOT NULL,
        build TEXT NOT NULL,
        created_at REAL NOT NULL,
        PRIMARY KEY (template, tag)
    ) WITHOUT ROWID;
    CREATE TABLE template_files (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        bytes INTEGER NOT NULL,
        used_at REAL NOT NULL
    ) WITHOUT ROWID;
    CREATE INDEX template_files_by_owner ON template_files (owner, used_at);
    """,
    """
    CREATE INDEX template_builds_by_owner ON template_builds (owner);
    """,
    """
    CREATE TABLE snapshot_bodies (
        id TEXT PRIMARY KEY,
        body TEXT NOT NULL
    ) WITHOUT ROWID;
    INSERT INTO snapshot_bodies SELECT id, body FROM snapshots;
    UPDATE snapshots SET body = json_remove(body, '$.env', '$.launch.start_command', '$.launch.ready_command');
    """,
    """
    CREATE TABLE template_build_logs (
        id TEXT PRIMARY KEY,
        logs TEXT NOT NULL
    ) WITHOUT ROWID;
    INSERT INTO template_build_logs SELECT id, json_extract(body, '$.logs') FROM template_builds
        WHERE json_extract(body, '$.logs') IS NOT NULL;
    UPDATE template_builds SET body = json_remove(body, '$.logs');
    """,
    """
    ALTER TABLE sandboxes ADD COLUMN volumes TEXT NOT NULL DEFAULT '{}';
    CREATE TABLE volumes (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        name TEXT NOT NULL,
        size_bytes INTEGER NOT NULL,
        created_at REAL NOT NULL,
        image TEXT,
        instance TEXT,
        UNIQUE (owner, name)
    ) WITHOUT ROWID;
    """,
    """
    ALTER TABLE keys ADD COLUMN expires_at REAL;
    ALTER TABLE keys ADD COLUMN replaced_by TEXT;
    ALTER TABLE sandboxes ADD COLUMN key_id TEXT NOT NULL DEFAULT '';
    CREATE TABLE quotas (
        owner TEXT NOT NULL,
        key_id TEXT NOT NULL,
        body TEXT NOT NULL,
        PRIMARY KEY (owner, key_id)
    ) WITHOUT ROWID;
    CREATE TABLE usage (
        owner TEXT NOT NULL,
        key_id TEXT NOT NULL,
        minute INTEGER NOT NULL,
        executions INTEGER NOT NULL,
        cpu_seconds REAL NOT NULL,
        PRIMARY KEY (owner, key_id, minute)
    ) WITHOUT ROWID;
    CREATE INDEX usage_by_minute ON usage (minute);
    """,
    """
    CREATE INDEX steps_of_owners ON steps (owner, started_at, id) WHERE kind = 'request';
    CREATE INDEX sandboxes_of_owners_ended ON sandboxes (owner, ended_at) WHERE ended_at IS NOT NULL;
    """,
)
