"""What a node answers to users, operators and agents. It knows no command of the leader, and no worker's inside."""
