"""testing.hosts: On which virtual machines do the real coordinator and the real launchers run?"""

from pliant.testing.hosts.coordinator_host import Host
from pliant.testing.hosts.virtual_launcher import VirtualLauncher

__all__ = ["Host", "VirtualLauncher"]
