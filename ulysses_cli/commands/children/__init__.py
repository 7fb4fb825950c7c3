"""What commands do around their child processes: a run, an evaluation, a proof, and what is published of a run."""
