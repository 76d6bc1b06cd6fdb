"""What hears of a run while it trains: released and public values only."""
