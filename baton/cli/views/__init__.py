"""Views that commands print: pages of status, node and top, rows of lists, merged events, checks of the doctor."""
