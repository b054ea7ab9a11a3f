"""What happens to the logits: distribution, draws, acceptance, commit, results."""
