"""What makes a node a decode node: it takes in the blocks of prompts computed elsewhere."""
