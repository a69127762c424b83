"""Views that commands print: pages of status, node and top, rows of lists, answers, events, checks of the doctor."""
