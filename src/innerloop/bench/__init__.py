"""Times the rules on this machine against what people run today, and against what the machine can do."""
