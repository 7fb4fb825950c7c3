"""Child processes of commands: what verify, bench and doctor start, and traces."""
