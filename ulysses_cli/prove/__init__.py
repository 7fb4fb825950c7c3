"""Commands that prove a claim: verify (exactness), trace (memory), bench (speed), doctor (a healthy machine)."""
