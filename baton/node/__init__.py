"""What both node roles are made of: lifecycle, the engine's driver thread, the routers' ports, the process."""
