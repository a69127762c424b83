"""How a step's attention is dealt to the programs of a GPU. Nothing here needs one."""
