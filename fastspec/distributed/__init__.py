"""One model over several processes: who holds which part, what they exchange, and what happens when one fails."""
