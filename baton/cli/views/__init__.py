"""What several commands show: pages of status, node and top; merged events; what the doctor looks at."""
