from stableair.cli import main

main()
