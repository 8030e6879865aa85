"""testing.hosts: On which virtual machines do the real coordinator and the real launchers run?"""
